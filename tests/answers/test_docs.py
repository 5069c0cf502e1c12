"""docs/answers.md says what is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl_fapo.answers import verify
from verl_fapo.settings import AnswerSettings

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "answers.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| (yes|no) \|$", DOCS, re.MULTILINE)
OPTIONS = dict(re.findall(r"^\| `([a-z_]{5,})` \| ([^|]+?) \|", DOCS, re.MULTILINE))


@pytest.mark.parametrize(("answer", "reference", "right"), ROWS)
def test_row_of_the_contract(answer, reference, right):
    assert verify(f"\\boxed{{{answer}}}", reference).correct is (right == "yes")


def test_every_option_stands_there_with_its_default():
    defaults = {name: str(value).lower() for name, value in AnswerSettings().model_dump().items()}
    defaults |= {"decimals": "unset", "timeout_seconds": "3"}
    assert {name: default.strip("`") for name, default in OPTIONS.items()} == defaults
