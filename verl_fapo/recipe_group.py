"""Hydra's config group ``recipe``: every YAML file under ``recipes/``, folders as sub-groups.

Hydra merges them in the order of the command line; they can be given in any, because no two that go together set one
key to different values (``tests/test_recipes.py``).
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf


class RecipeGroup(SearchPathPlugin):
    """Puts the recipes into Hydra's store when a command composes its config."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        _store(files("verl_fapo.recipes"), "recipe")


def _store(folder: Traversable, group: str) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            _store(entry, f"{group}/{entry.name}")
        elif entry.name.endswith(".yaml"):
            node = OmegaConf.create(entry.read_text(encoding="utf-8"))
            if "fapo" in node:
                # Hydra would refuse an unknown fapo.* key with advice to force it in; ours names the right one.
                OmegaConf.set_struct(node.fapo, False)
            ConfigStore.instance().store(group=group, name=entry.name[:-5], node=node, package="_global_")


def longest_sequences(count: int, *, _root_: DictConfig) -> int:
    """``${fapo.sequences:COUNT}``: tokens of so many sequences of the longest prompt and response."""
    return count * (_root_.data.max_prompt_length + _root_.data.max_response_length)


OmegaConf.register_new_resolver("fapo.sequences", longest_sequences, replace=True)
