from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from verl_fapo.errors import SettingsError
from verl_fapo.settings import FAPOSettings, parse_settings, read_settings, setting_names

GOOD = {"judge": {"model": "/models/genrm"}}


def test_defaults_are_the_papers_penalty_and_a_standalone_judge():
    settings = parse_settings(GOOD)
    assert (settings.penalty, settings.genrm.placement, settings.genrm.num_devices) == (1.0, "standalone", 1)


def test_replicas_times_tensor_parallel_devices_are_taken():
    assert parse_settings({**GOOD, "genrm": {"replicas": 3, "tensor_parallel": 2}}).genrm.num_devices == 6


def test_external_servers_take_no_device():
    block = {**GOOD, "genrm": {"placement": "external", "endpoints": ["http://h:1"], "replicas": 4}}
    assert parse_settings(block).genrm.num_devices == 0


@pytest.mark.parametrize(
    ("block", "said"),
    [
        pytest.param({"penalty": 2.5, **GOOD}, "fapo.penalty=2.5", id="range"),
        pytest.param({"penaltyy": 1, **GOOD}, "did you mean fapo.penalty", id="close name"),
        pytest.param({"xyz": 1, **GOOD}, "fapo has penalty, run_dir", id="far name"),
        pytest.param({"judge": {"model": "m", "on_unknown": "ignore"}}, "fapo.judge.on_unknown='ignore'", id="choice"),
        pytest.param({}, "fapo: judge.model is not set", id="no judge"),
        pytest.param({"judge": {"model": "m", "samples": 0}}, "fapo.judge.samples=0", id="samples"),
        pytest.param({"judge": {"model": "m", "scope": "some"}}, "fapo.judge.scope='some'", id="scope"),
        pytest.param(
            {"judge": {"model": "m", "samples": 3, "temperature": 0}},
            "samples is 3 but temperature is 0.*set temperature above 0, or samples to 1",
            id="samples that are the same",
        ),
    ],
)
def test_mistake_names_key_value_and_way_out(block, said):
    with pytest.raises(SettingsError, match=said):
        parse_settings(block)


def test_config_without_the_recipe_is_refused():
    with pytest.raises(SettingsError, match=r"\+recipe=fapo"):
        read_settings(OmegaConf.create({"trainer": {}}))


def test_hydra_that_did_not_find_the_group_leaves_a_plain_value_which_is_refused():
    with pytest.raises(SettingsError, match="expected settings"):
        read_settings(OmegaConf.create({"fapo": "fapo"}))


def test_settings_can_not_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        parse_settings(GOOD).penalty = 2.0


def test_every_name_of_the_tree_is_listed():
    names = setting_names()
    assert {"fapo.penalty", "fapo.judge", "fapo.judge.model", "fapo.genrm.replicas"} <= set(names)
    assert len(names) == len(set(names)) > len(FAPOSettings.model_fields)
