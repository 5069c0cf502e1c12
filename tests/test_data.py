from __future__ import annotations

import json
import re

import pyarrow.parquet

from verl_fapo.answers import verify
from verl_fapo.data import fapo_critic_rows, gsm8k_rows, word_problem_rows, write_parquet
from verl_fapo.templates import tagged_paragraphs


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


def test_fapo_critic_keeps_prompt_label_and_number_of_paragraphs(shared_data, tmp_path):
    source = shared_data / "fapo_critic_sample.jsonl"
    given = [json.loads(line) for line in source.read_text().splitlines()]
    rows = list(fapo_critic_rows(source, split="train"))
    assert [row["prompt"][0]["content"] for row in rows] == [row["prompt"][0]["content"] for row in given]
    assert [row["reward_model"] for row in rows] == [row["reward_model"] for row in given]
    assert sum(row["reward_model"]["ground_truth"] == -1 for row in rows) == 50
    for row in rows:
        assert len(tagged_paragraphs(row["prompt"][0]["content"])) == row["extra_info"]["total_steps"]
    write_parquet(rows, tmp_path / "critic.parquet")
    assert list(fapo_critic_rows(tmp_path / "critic.parquet", split="train")) == rows


def test_written_file_reads_back(tmp_path):
    rows = list(word_problem_rows(3, seed=1, split="train"))
    write_parquet(rows, tmp_path / "deep" / "problems.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "deep" / "problems.parquet").to_pylist() == rows
