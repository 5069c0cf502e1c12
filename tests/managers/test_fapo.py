from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoTokenizer

from tests.conftest import read_lines
from verl_fapo.critique import UnknownReason, Verdict
from verl_fapo.judge import Judgement


class FakeJudge:
    """Stands in for the HTTP client, which test_judge.py drives against real servers."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.asked: list[dict] = []

    async def judge(self, **question: str) -> Judgement:
        self.asked.append(question)
        return Judgement(verdict=self.verdict, critique="because", seconds=0.5)


@pytest.fixture
def tokenizer(workshop):
    return AutoTokenizer.from_pretrained(workshop / "policy")


@pytest.fixture
async def manager(compose, tokenizer, tmp_path):
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    config = compose(
        "+recipe=fapo",
        "fapo.genrm.placement=external",
        "fapo.genrm.endpoints=[http://127.0.0.1:9]",
        "fapo.judge.model=genrm",
        f"fapo.run_dir={tmp_path}",
    )
    return get_reward_manager_cls("fapo")(config, tokenizer, compute_score=None)


def batch(tokenizer, solution: str, *, padding: int = 4, **row: object):
    """One rollout as veRL hands it over."""
    from verl import DataProto

    prompt, response = torch.tensor([[5, 6, 7]]), torch.tensor([tokenizer(solution)["input_ids"]])
    response = torch.nn.functional.pad(response, (0, padding), value=tokenizer.pad_token_id)
    mask = torch.ones(1, 3 + response.shape[1], dtype=torch.long)
    mask[:, mask.shape[1] - padding :] = 0
    values = {
        "uid": "abc",
        "session_id": 3,
        "global_steps": 2,
        "data_source": "sums",
        "raw_prompt": [{"role": "user", "content": "What is 3 + 4? Box it."}],
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 0, "question": "What is 3 + 4?"},
        **row,
    }
    objects = {}
    for key, value in values.items():
        objects[key] = np.empty(1, dtype=object)
        objects[key][0] = value
    tensors = {"prompts": prompt, "responses": response, "attention_mask": mask}
    return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=objects)


RIGHT, WRONG = "So.\n\n\\boxed{7}", "So.\n\n\\boxed{8}"
CASES = [
    # solution, verdict, reward, extras
    pytest.param(RIGHT, Verdict(index=-1), 1.0, (1, 1, 0, 0), id="clean"),
    pytest.param(RIGHT, Verdict(index=0), 0.0, (1, 1, 1, 0), id="flawed"),
    pytest.param(RIGHT, Verdict(reason=UnknownReason.NO_BOX), 1.0, (1, 1, 0, 1), id="unknown"),
    pytest.param(WRONG, Verdict(index=0), -1.0, (0, 0, 0, 0), id="wrong"),
    pytest.param("", Verdict(index=0), -1.0, (0, 0, 0, 0), id="empty"),
]


@pytest.mark.parametrize(("solution", "verdict", "reward", "flags"), CASES)
async def test_rollout_is_scored_and_recorded(manager, tokenizer, tmp_path, solution, verdict, reward, flags):
    manager._judge = judge = FakeJudge(verdict)
    result = await manager.run_single(batch(tokenizer, solution))
    info = result["reward_extra_info"]
    assert result["reward_score"] == reward
    assert (info["acc"], info["judged"], info["flawed"], info["unknown"]) == flags
    assert judge.asked == [{"problem": "What is 3 + 4?", "reference": "7", "solution": solution}] * flags[1]
    (part,) = (tmp_path / "parts").iterdir()
    (record,) = read_lines(part)
    assert (record["id"], record["step"], record["reward"]) == ("abc_3", 2, reward)
    assert record["judged"] is bool(flags[1]) and record["solution"] == solution


async def test_extras_have_the_same_keys_and_types_for_every_rollout(manager, tokenizer):
    manager._judge = FakeJudge(Verdict(index=0))
    batches = [batch(tokenizer, RIGHT), batch(tokenizer, WRONG), batch(tokenizer, RIGHT, reward_model=None)]
    infos = [(await manager.run_single(data))["reward_extra_info"] for data in batches]
    assert len({tuple((key, type(value)) for key, value in info.items()) for info in infos}) == 1
    assert "reward" not in infos[0]


async def test_validation_rows_are_not_judged(manager, tokenizer):
    manager._judge = judge = FakeJudge(Verdict(index=0))
    result = await manager.run_single(batch(tokenizer, RIGHT, fapo_validation=True))
    assert result["reward_score"] == 1.0
    assert judge.asked == []


async def test_row_without_a_question_is_judged_by_its_prompt(manager, tokenizer):
    manager._judge = judge = FakeJudge(Verdict(index=-1))
    await manager.run_single(batch(tokenizer, RIGHT, extra_info=None))
    assert [question["problem"] for question in judge.asked] == ["What is 3 + 4? Box it."]


async def test_full_disk_changes_no_reward(manager, tokenizer, monkeypatch, caplog):
    manager._judge = FakeJudge(Verdict(index=0))
    monkeypatch.setattr(manager._log, "write", full_disk)
    result = await manager.run_single(batch(tokenizer, RIGHT))
    assert (result["reward_score"], result["reward_extra_info"]["flawed"]) == (0.0, 1.0)
    assert "could not record rollout abc_3" in caplog.text


def full_disk(record: dict) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("row", [{"raw_prompt": None, "extra_info": None}, {"raw_prompt": None, "extra_info": "x"}])
async def test_right_answer_that_can_not_be_judged_keeps_the_rules_reward(manager, tokenizer, tmp_path, row):
    manager._judge = FakeJudge(Verdict(index=0))
    result = await manager.run_single(batch(tokenizer, RIGHT, **row))
    info = result["reward_extra_info"]
    assert (result["reward_score"], info["acc"], info["judged"], info["unknown"]) == (1.0, 1.0, 1.0, 1.0)
    (part,) = (tmp_path / "parts").iterdir()
    assert read_lines(part)[0]["reason"] == "error"


async def test_judge_address_that_is_none_is_unreachable(compose, tokenizer, manager):
    manager._judge._endpoints = iter(["http://a..b:1"] * 10)
    result = await manager.run_single(batch(tokenizer, RIGHT))
    await manager._judge.close()
    assert (result["reward_score"], result["reward_extra_info"]["unknown"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    "row",
    [
        {"reward_model": None},
        {"reward_model": {"ground_truth": None}},
        {"reward_model": {"ground_truth": float("nan")}},
        {"reward_model": {"ground_truth": ["7"]}},
    ],
)
async def test_broken_row_is_unknown_and_no_exception(manager, tokenizer, row, caplog):
    manager._judge = FakeJudge(Verdict(index=-1))
    result = await manager.run_single(batch(tokenizer, RIGHT, **row))
    info = result["reward_extra_info"]
    assert result["reward_score"] == -1.0
    assert (info["judged"], info["unknown"]) == (1.0, 1.0)
    assert "could not score" in caplog.text
