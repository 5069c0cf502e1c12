"""What verl_fapo registers, and when. veRL imports this module inside every ``import verl``.

Nothing heavy is imported here: what needs veRL waits until veRL's own module is imported.
"""

import sys
from importlib import import_module

from hydra.core.plugins import Plugins
from wrapt import when_imported

from verl_fapo.cpu.fork_server import start_early
from verl_fapo.recipe_group import RecipeGroup

# `+recipe=fapo` on any Hydra command
Plugins.instance().register(RecipeGroup)

# reward.reward_manager.name=fapo, fapo_genrm
for manager in ("fapo", "fapo_genrm"):
    when_imported("verl.experimental.reward_loop.reward_manager")(
        lambda _, manager=manager: import_module(f"verl_fapo.managers.{manager}")
    )

# trainer.v1.trainer_mode=fapo_sync, fapo_colocate_async, fapo_separate_async
when_imported("verl.trainer.ppo.v1")(lambda _: import_module("verl_fapo.trainer"))

# +recipe/device=cpu in this process's command
start_early(sys.argv)

# VERL_PLATFORM=cpu, which +recipe/device=cpu sets
when_imported("verl.plugin.platform")(lambda _: import_module("verl_fapo.cpu.platform").activate_if_chosen())
