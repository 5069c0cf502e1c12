from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from verl_fapo.errors import SettingsError
from verl_fapo.settings import FAPOSettings, parse_settings, read_settings, setting_names

GOOD = {"judge": {"model": "/models/genrm"}}
NO_JUDGE = {"genrm": {"placement": "none"}}


def test_defaults_are_the_papers_penalty_and_a_standalone_judge():
    settings = parse_settings(GOOD)
    assert (settings.penalty, settings.genrm.placement, settings.genrm.num_devices) == (1.0, "standalone", 1)


def test_replicas_times_tensor_parallel_devices_are_taken():
    assert parse_settings({**GOOD, "genrm": {"replicas": 3, "tensor_parallel": 2}}).genrm.num_devices == 6


@pytest.mark.parametrize(
    ("given", "penalty"),
    [
        pytest.param({}, 1.0, id="the paper's"),
        pytest.param({"penalty": None, "rho_shift": None}, 1.0, id="both unset, as in the recipe"),
        pytest.param({"penalty": 0.25}, 0.25, id="penalty"),
        pytest.param({"penalty": 0}, 0.0, id="penalty 0"),
        pytest.param({"penalty": None, "rho_shift": 1}, 1.0, id="as many right as wrong"),
        pytest.param({"rho_shift": 3}, 0.5, id="three times as many"),
        pytest.param({"rho_shift": 0}, 2.0, id="from the start"),
    ],
)
def test_lambda_is_penalty_or_made_from_rho_shift(given, penalty):
    assert parse_settings({**GOOD, **given}).penalty == penalty


def test_baseline_needs_no_judge_and_no_device():
    settings = parse_settings({"penalty": 0, **NO_JUDGE})
    assert (settings.penalty, settings.genrm.num_devices) == (0, 0)


def test_external_servers_take_no_device():
    block = {**GOOD, "genrm": {"placement": "external", "endpoints": ["http://h:1"], "replicas": 4}}
    assert parse_settings(block).genrm.num_devices == 0


@pytest.mark.parametrize(
    ("block", "said"),
    [
        pytest.param({"penalty": 2.5, **GOOD}, "fapo.penalty=2.5", id="range"),
        pytest.param({"penaltyy": 1, **GOOD}, "did you mean fapo.penalty", id="close name"),
        pytest.param({"xyz": 1, **GOOD}, "fapo has penalty, rho_shift, run_dir", id="far name"),
        pytest.param(
            {"penalty": 1, "rho_shift": 1, **GOOD}, "penalty is 1 and rho_shift is 1; set one", id="lambda twice"
        ),
        pytest.param(
            {"rho_shift": -1, **GOOD}, "rho_shift is -1, expected a finite number of at least 0", id="rho_shift below 0"
        ),
        pytest.param({"rho_shift": "2", **GOOD}, "fapo.rho_shift='2'", id="rho_shift is a text"),
        pytest.param({"rho_shift": True, **GOOD}, "fapo.rho_shift=True", id="rho_shift is a truth value"),
        pytest.param({"penalty": 0.5, **NO_JUDGE}, "without a judge nothing is flawed; set penalty to 0", id="no use"),
        pytest.param({"memory": {"max_entries": -1}, **GOOD}, "fapo.memory.max_entries=-1", id="memory below 0"),
        pytest.param({"overlong": {"buffer": 4.5}, **GOOD}, "fapo.overlong.buffer=4.5", id="half a token"),
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
