from __future__ import annotations

import pytest

from verl_fapo.critique import UnknownReason, Verdict
from verl_fapo.rewards import fapo_reward

CLEAN, FLAWED, UNKNOWN = Verdict(index=-1), Verdict(index=2), Verdict(reason=UnknownReason.TIMEOUT)

CASES = [
    # correct, verdict, penalty, on_unknown, reward
    pytest.param(True, CLEAN, 1.0, "keep", 1.0, id="right and clean"),
    pytest.param(True, FLAWED, 1.0, "keep", 0.0, id="right and flawed"),
    pytest.param(True, FLAWED, 0.0, "keep", 1.0, id="penalty 0 is the outcome reward"),
    pytest.param(True, FLAWED, 2.0, "keep", -1.0, id="penalty 2 makes it as bad as wrong"),
    pytest.param(True, UNKNOWN, 1.0, "keep", 1.0, id="unknown keeps the rule's reward"),
    pytest.param(True, UNKNOWN, 1.0, "penalise", 0.0, id="unknown counts as flawed"),
    pytest.param(True, None, 1.0, "penalise", 1.0, id="not judged"),
    pytest.param(False, None, 1.0, "keep", -1.0, id="wrong"),
    pytest.param(False, FLAWED, 1.0, "penalise", -1.0, id="a wrong answer's verdict is ignored"),
]


@pytest.mark.parametrize(("correct", "verdict", "penalty", "on_unknown", "reward"), CASES)
def test_fapo_reward(correct, verdict, penalty, on_unknown, reward):
    assert fapo_reward(correct, verdict, penalty=penalty, on_unknown=on_unknown) == reward
