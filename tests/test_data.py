from __future__ import annotations

import re

import pyarrow.parquet

from verl_fapo.answers import verify
from verl_fapo.data import gsm8k_rows, word_problem_rows, write_parquet


def test_word_problems_come_again_with_their_seed_and_differ_from_another_ones():
    first, again, other = (list(word_problem_rows(5, seed=seed, split="train")) for seed in (1, 1, 2))
    assert first == again != other


def test_examples_are_for_the_policy_alone_and_are_right():
    (row,) = word_problem_rows(1, seed=1, split="train", num_examples=2)
    roles = [message["role"] for message in row["prompt"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert row["prompt"][-1]["content"].startswith(row["extra_info"]["question"])
    (example,) = re.findall(r"That makes (\d+)", row["prompt"][1]["content"])
    assert verify(row["prompt"][1]["content"], example).correct


def test_gsm8k_answers_are_plain_numbers(shared_data):
    rows = list(gsm8k_rows(shared_data / "gsm8k_train.jsonl.gz", split="train"))
    assert len(rows) == 7473
    assert rows[0]["reward_model"]["ground_truth"] == "72"
    assert rows[0]["extra_info"]["question"].startswith("Natalia sold clips")
    assert not any("," in row["reward_model"]["ground_truth"] for row in rows)


def test_gsm8k_can_be_read_in_part(shared_data):
    rows = list(gsm8k_rows(shared_data / "gsm8k_test.jsonl", split="test", limit=3))
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]


def test_written_file_reads_back(tmp_path):
    rows = list(word_problem_rows(3, seed=1, split="train"))
    write_parquet(rows, tmp_path / "deep" / "problems.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "deep" / "problems.parquet").to_pylist() == rows
