from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoTokenizer

from tests.conftest import read_lines
from verl_fapo.critique import UnknownReason, Verdict
from verl_fapo.judge import Judgement
from verl_fapo.run_folder import VERDICTS
from verl_fapo.settings import parse_settings

EXTRAS = {
    "acc": float, "judged": float, "flawed": float, "unknown": float, "reason": str, "from_memory": float,
    "judge_seconds": float, "judge_tokens": float, "generated_at": float, "scored_at": float,
}  # fmt: skip


class FakeJudge:
    """Stands in for the HTTP client, which test_judge.py drives against real servers."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.asked: list[dict] = []

    async def judge(self, **question: str) -> Judgement:
        self.asked.append(question)
        return Judgement(verdict=self.verdict, critique="because", seconds=0.5, tokens=7, from_memory=True)


@pytest.fixture
def tokenizer(workshop):
    return AutoTokenizer.from_pretrained(workshop / "policy")


@pytest.fixture
def make_manager(compose, tokenizer, tmp_path):
    """Makes the manager of a command with overrides, whose judge is an address where nobody is."""
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    def make_manager(*overrides: str, recipe: str = "fapo", judge: FakeJudge | None = None):
        config = compose(
            f"+recipe={recipe}",
            *(["fapo.genrm.placement=external"] if recipe == "fapo" else []),
            *(["fapo.genrm.endpoints=[http://127.0.0.1:9]"] if recipe == "fapo" else []),
            "fapo.judge.model=genrm",
            f"fapo.run_dir={tmp_path}",
            *overrides,
        )
        manager = get_reward_manager_cls("fapo")(config, tokenizer, compute_score=None)
        if judge:
            manager._judge = judge
        return manager

    return make_manager


@pytest.fixture
async def manager(make_manager):  # async: veRL's base class wants an event loop
    return make_manager()


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
    assert (record["ground_truth"], record["from_memory"]) == ("7", bool(flags[1]))


async def test_extras_have_the_same_keys_and_types_for_every_rollout(manager, tokenizer):
    manager._judge = FakeJudge(Verdict(index=0))
    batches = [batch(tokenizer, RIGHT), batch(tokenizer, WRONG), batch(tokenizer, RIGHT, reward_model=None)]
    for data in batches:
        info = (await manager.run_single(data))["reward_extra_info"]
        assert {key: type(value) for key, value in info.items()} == EXTRAS


async def test_extras_tell_time_tokens_and_memory_of_the_judgement(manager, tokenizer):
    manager._judge = FakeJudge(Verdict(index=0))
    info = (await manager.run_single(batch(tokenizer, RIGHT)))["reward_extra_info"]
    assert (info["judge_seconds"], info["judge_tokens"], info["from_memory"]) == (0.5, 7.0, 1.0)
    assert info["generated_at"] <= info["scored_at"]


@pytest.mark.parametrize(
    ("overrides", "validation", "reward", "asked"),
    [
        pytest.param([], True, 1.0, 0, id="validation is not judged"),
        pytest.param(["fapo.judge.validation=true"], True, 0.0, 1, id="unless it is wished"),
        pytest.param(["fapo.penalty=0.5"], False, 0.5, 1, id="penalty"),
        pytest.param(["fapo.penalty=0"], False, 1.0, 1, id="penalty 0 only logs"),
        pytest.param(["fapo.rho_shift=3"], False, 0.5, 1, id="penalty from rho_shift"),
    ],
)
async def test_settings_decide_who_is_judged_and_what_it_costs(
    make_manager, tokenizer, overrides, validation, reward, asked
):
    judge = FakeJudge(Verdict(index=0))
    data = batch(tokenizer, RIGHT, fapo_validation=validation)
    result = await make_manager(*overrides, judge=judge).run_single(data)
    assert (result["reward_score"], len(judge.asked)) == (reward, asked)


@pytest.mark.parametrize(("on_unknown", "reward"), [("keep", 1.0), ("neutral", 1.0), ("penalise", 0.5)])
async def test_unknown_verdict_is_treated_as_set(make_manager, tokenizer, on_unknown, reward):
    judge = FakeJudge(Verdict(reason=UnknownReason.TIMEOUT))
    manager = make_manager(f"fapo.judge.on_unknown={on_unknown}", "fapo.penalty=0.5", judge=judge)
    result = await manager.run_single(batch(tokenizer, RIGHT))
    info = result["reward_extra_info"]
    assert (result["reward_score"], info["unknown"], info["flawed"], info["reason"]) == (reward, 1.0, 0.0, "timeout")


async def test_baseline_asks_nobody_and_has_the_same_extras(make_manager, tokenizer):
    manager = make_manager(recipe="baseline")
    for solution, reward in ((RIGHT, 1.0), (WRONG, -1.0)):
        result = await manager.run_single(batch(tokenizer, solution))
        info = result["reward_extra_info"]
        assert (result["reward_score"], info["judged"]) == (reward, 0.0)
        assert {key: type(value) for key, value in info.items()} == EXTRAS


@pytest.mark.parametrize(("solution", "reward"), [(RIGHT, 0.0), (WRONG, -1.0)])
async def test_long_response_loses_on_top_of_the_rest(make_manager, tokenizer, tmp_path, solution, reward):
    length = len(tokenizer(solution)["input_ids"])
    limits = [f"data.max_response_length={length + 1}", "fapo.overlong.buffer=4", "fapo.overlong.factor=2"]
    manager = make_manager(*limits, judge=FakeJudge(Verdict(index=0)))
    result = await manager.run_single(batch(tokenizer, solution))
    assert result["reward_score"] == pytest.approx(reward - 2 * 3 / 4), "3 of 4 tokens into the buffer"
    (part,) = (tmp_path / "parts").iterdir()
    (record,) = read_lines(part)
    assert (record["reward"], record["reward_for_length"]) == (result["reward_score"], -2 * 3 / 4)


@pytest.mark.parametrize(
    ("memory", "place"),
    [
        pytest.param({}, "run/" + VERDICTS, id="in the run folder"),
        pytest.param({"path": "shared.sqlite"}, "shared.sqlite", id="in a file that is named"),
        pytest.param({"max_entries": 0}, None, id="nowhere"),
    ],
)
async def test_judgements_are_kept(tmp_path, monkeypatch, memory, place):
    from verl_fapo.managers.fapo import judge_client

    monkeypatch.chdir(tmp_path)
    genrm = {"placement": "external", "endpoints": ["http://h:1"]}
    client = judge_client(parse_settings({"judge": {"model": "m"}, "genrm": genrm, "memory": memory, "run_dir": "run"}))
    if place is None:
        assert client._memory is None
    else:
        client._memory.put("key", Verdict(index=1), "because")
        assert (tmp_path / place).is_file()


def test_judge_and_its_memory_are_as_set(monkeypatch):
    from verl_fapo.managers import fapo

    memory, client = mock.Mock(), mock.Mock()
    monkeypatch.setattr(fapo, "VerdictMemory", memory)
    monkeypatch.setattr(fapo, "JudgeClient", client)
    settings = parse_settings(
        {
            "judge": {"model": "m"},
            "genrm": {"placement": "external", "endpoints": ["http://h:1"]},
            "memory": {"path": "shared.sqlite", "max_entries": 5, "checkpoint": "step 40"},
        }
    )
    assert fapo.judge_client(settings) is client.return_value
    memory.assert_called_once_with(Path("shared.sqlite"), max_entries=5)
    client.assert_called_once_with(settings.judge, "http://h:1", memory=memory.return_value, checkpoint="step 40")


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


async def test_judge_address_that_is_none_is_unreachable(make_manager, tokenizer):
    manager = make_manager("fapo.genrm.endpoints=['http://a..b:1']")
    result = await manager.run_single(batch(tokenizer, RIGHT))
    await manager._judge.close()
    info = result["reward_extra_info"]
    assert (result["reward_score"], info["reason"]) == (1.0, "unreachable")


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
