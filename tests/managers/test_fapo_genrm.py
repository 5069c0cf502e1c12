from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from tests.conftest import read_lines
from tests.managers.test_fapo import batch, full_disk
from verl_fapo.critique import UnknownReason
from verl_fapo.templates import judge_prompt

PROMPT = judge_prompt("What is 3 + 4?", "7", ["Three.", "Four.", "Seven.", "So \\boxed{7}."])
EXTRAS = {
    "acc": float, "judged": float, "flawed": float, "unknown": float, "reason": str, "truly_flawed": float,
    "distance": float,
}  # fmt: skip
LIMIT = 1000
"""Tokens, more than any critique here has."""


@pytest.fixture
def tokenizer(workshop):
    return AutoTokenizer.from_pretrained(workshop / "judge")


@pytest.fixture
async def make_manager(compose, tokenizer, tmp_path):
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    def make_manager(*overrides: str):
        config = compose(
            "+recipe=fapo_genrm", f"fapo.run_dir={tmp_path}", f"data.max_response_length={LIMIT}", *overrides
        )
        return get_reward_manager_cls("fapo_genrm")(config, tokenizer, compute_score=None)

    return make_manager


def critique(tokenizer, text: str, label: object, **row: object):
    """One critique of a solution of four paragraphs, as veRL hands it over."""
    values = {
        "raw_prompt": [{"role": "user", "content": PROMPT}],
        "reward_model": {"style": "rule", "ground_truth": label},
        "extra_info": {"index": 0, "total_steps": 4},
        **row,
    }
    return batch(tokenizer, text, **values)


CASES = [
    # critique, label, reward, acc, flawed, unknown, distance
    pytest.param("\\boxed{-1}", -1, 1.0, (1, 0, 0, 0), id="both clean"),
    pytest.param("\\boxed{2}", 2, 1.0, (1, 1, 0, 0), id="named the paragraph"),
    pytest.param("\\boxed{0}", 3, 0.25, (1, 1, 0, 3), id="far from it"),
    pytest.param("\\boxed{1}", 2, 0.75, (1, 1, 0, 1), id="near"),
    pytest.param("\\boxed{-1}", 2, -1.0, (0, 0, 0, 0), id="missed"),
    pytest.param("\\boxed{2}", -1, -1.0, (0, 1, 0, 0), id="false alarm"),
    pytest.param("\\boxed{4}", 3, -1.0, (0, 0, 1, 0), id="no such paragraph"),
    pytest.param("hm", -1, -1.0, (0, 0, 1, 0), id="no verdict"),
    pytest.param("", -1, -1.0, (0, 0, 1, 0), id="empty"),
    pytest.param("\\boxed{2}", 2.0, 1.0, (1, 1, 0, 0), id="label as a whole double"),
    pytest.param("\\boxed{2}", "2", 1.0, (1, 1, 0, 0), id="label as text"),
]


@pytest.mark.parametrize(("text", "label", "reward", "flags"), CASES)
async def test_critique_is_scored_by_its_verdict_and_recorded(
    make_manager, tokenizer, tmp_path, text, label, reward, flags
):
    result = await make_manager().run_single(critique(tokenizer, text, label))
    info = result["reward_extra_info"]
    assert result["reward_score"] == reward
    assert (info["acc"], info["flawed"], info["unknown"], info["distance"]) == flags
    assert info["truly_flawed"] == (int(label) >= 0)
    assert {key: type(value) for key, value in info.items()} == EXTRAS
    (part,) = (tmp_path / "parts").iterdir()
    (record,) = read_lines(part)
    assert (record["id"], record["critique"], record["reward"]) == ("abc_3", text, reward)
    assert (record["correct"], record["ground_truth"]) == (bool(flags[0]), str(int(label)))
    predicted = None if flags[2] else int(text[7:-1])
    verdict = "unknown" if flags[2] else "flawed" if flags[1] else "clean"
    assert (record["verdict"], record["index"]) == (verdict, predicted)
    assert record["answer"] == (None if predicted is None else str(predicted))
    assert record["problem"] == PROMPT
    assert record["solution"] == "Three.\n\nFour.\n\nSeven.\n\nSo \\boxed{7}."


@pytest.mark.parametrize(
    ("extra_info", "text", "reward"),
    [
        pytest.param({"total_steps": 6}, "\\boxed{5}", 1 - 3 / 6, id="as the row says"),
        pytest.param({}, "\\boxed{3}", 0.75, id="as the prompt's tags say"),
        pytest.param(None, "\\boxed{3}", 0.75, id="no extra_info"),
        pytest.param({}, "\\boxed{5}", -1.0, id="beyond the tags"),
    ],
)
async def test_number_of_paragraphs_is_the_rows_or_that_of_the_tags(make_manager, tokenizer, extra_info, text, reward):
    data = critique(tokenizer, text, 2, extra_info=extra_info)
    assert (await make_manager().run_single(data))["reward_score"] == pytest.approx(reward)


@pytest.mark.parametrize(
    ("ends", "room", "reason"),
    [
        pytest.param(False, 0, "truncated", id="at the limit, without an end"),
        pytest.param(False, 1, "", id="before the limit"),
        pytest.param(True, 0, "", id="at the limit, with an end"),
    ],
)
async def test_critique_that_is_cut_off_has_no_verdict(make_manager, tokenizer, ends, room, reason):
    text = "\\boxed{-1}" + (tokenizer.eos_token if ends else "")
    length = len(tokenizer(text)["input_ids"])
    manager = make_manager(f"data.max_response_length={length + room}")
    result = await manager.run_single(critique(tokenizer, text, -1))
    assert result["reward_extra_info"]["reason"] == reason
    assert result["reward_score"] == (-1.0 if reason else 1.0)


async def test_long_critique_loses_on_top_of_the_rest(make_manager, tokenizer, tmp_path):
    text = "\\boxed{1}" + tokenizer.eos_token
    length = len(tokenizer(text)["input_ids"])
    manager = make_manager(f"data.max_response_length={length}", "fapo.overlong.buffer=4", "fapo.overlong.factor=0.5")
    result = await manager.run_single(critique(tokenizer, text, 2))
    assert result["reward_score"] == pytest.approx(0.75 - 0.5)
    (part,) = (tmp_path / "parts").iterdir()
    (record,) = read_lines(part)
    assert (record["reward"], record["reward_for_length"]) == (result["reward_score"], -0.5)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"reward_model": None}, id="no label"),
        pytest.param({"reward_model": {"ground_truth": "two"}}, id="no number"),
        pytest.param({"reward_model": {"ground_truth": 4}}, id="beyond the paragraphs"),
        pytest.param({"reward_model": {"ground_truth": -2}}, id="below -1"),
        pytest.param({"reward_model": {"ground_truth": 1.5}}, id="between two paragraphs"),
        pytest.param({"extra_info": {"total_steps": "many"}}, id="no count"),
        pytest.param({"extra_info": {"total_steps": 0}}, id="no paragraphs"),
        pytest.param({"raw_prompt": None}, id="no prompt"),
    ],
)
async def test_broken_row_is_unknown_and_no_exception(make_manager, tokenizer, caplog, row):
    result = await make_manager().run_single(critique(tokenizer, "\\boxed{2}", 2, **row))
    info = result["reward_extra_info"]
    assert (result["reward_score"], info["reason"]) == (-1.0, UnknownReason.ERROR)
    assert {key: type(value) for key, value in info.items()} == EXTRAS
    assert "could not score a critique" in caplog.text


async def test_full_disk_changes_no_reward(make_manager, tokenizer, monkeypatch, caplog):
    manager = make_manager()
    monkeypatch.setattr(manager._log, "write", full_disk)
    result = await manager.run_single(critique(tokenizer, "\\boxed{1}", 2))
    assert result["reward_score"] == 0.75
    assert "could not record critique abc_3" in caplog.text


async def test_rows_of_fapo_critic_are_scored(make_manager, tokenizer, shared_data):
    from verl_fapo.data import fapo_critic_rows

    manager, rewards = make_manager(), set()
    for row in fapo_critic_rows(next(shared_data.glob("*critic*.jsonl")), split="train", limit=20):
        label = row["reward_model"]["ground_truth"]
        data = critique(
            tokenizer,
            f"\\boxed{{{label}}}",
            label,
            raw_prompt=row["prompt"],
            extra_info=row["extra_info"],
        )
        result = await manager.run_single(data)
        rewards.add((result["reward_score"], result["reward_extra_info"]["acc"]))
    assert rewards == {(1.0, 1.0)}
