from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import psutil
import pytest

from benchmarks.tiny_world import Writer, measure_judge, measure_policy
from verl_fapo.demo import warmup
from verl_fapo.demo.lessons import NUM_INVENTED, NUM_SOLUTIONS, apprentice_lessons, judge_lessons, policy_lessons
from verl_fapo.demo.tokenizer import make_tokenizer
from verl_fapo.demo.warmup import tiny_models
from verl_fapo.demo.world import problems, solution
from verl_fapo.errors import WarmUpError

QUIET = {"say": lambda text: None}
BOTH = ("policy", "judge")
NUM_PROBLEMS = 400


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def models(cache: Path) -> list[Path]:
    return tiny_models(cache, ["policy", "judge"], seed=1, **QUIET)


@pytest.fixture
def made_at_once(monkeypatch) -> list[int]:
    """No training; the list has the seed of every warm-up."""
    seeds = []

    def warm_up(folder: Path, names: Sequence[str], *, seed: int, say: object) -> None:
        seeds.append(seed)
        for name in names:
            (folder / name).mkdir(parents=True)

    monkeypatch.setattr(warmup, "_warm_up", warm_up)
    return seeds


@pytest.mark.parametrize("lessons", [policy_lessons, judge_lessons, apprentice_lessons])
def test_every_lesson_is_known_short_and_decoded_to_the_letter(lessons, tokenizer):
    # Some of each kind: the kinds come one after the other.
    for lesson in islice(lessons(7), 0, NUM_SOLUTIONS + NUM_INVENTED + 5000, 50):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": lesson.prompt}], add_generation_prompt=True, return_dict=False
        )
        answer = tokenizer.encode(lesson.answer)
        assert tokenizer.unk_token_id not in prompt + answer
        assert len(prompt) <= 250 and len(answer) < 80
        assert tokenizer.decode(prompt) == f"<|user|>{lesson.prompt}<|assistant|>"
        assert tokenizer.decode(answer, skip_special_tokens=True) == lesson.answer


def test_policy_answers_within_64_tokens(tokenizer):
    for problem in islice(problems("test", seed=1), 300):
        assert len(tokenizer.encode(solution(problem))) < 60


@pytest.mark.parametrize("text", ["Any (ASCII) text, 1234 & more:\n\n\n\t{x}\r\n", "99 + 5 = 104.", ""])
def test_other_text_is_told_by_its_characters(text, tokenizer):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unknown_characters_become_one_token(tokenizer):
    assert tokenizer.decode(tokenizer.encode("7 \N{SNOWMAN}")) == "7 <|unk|>"


def test_models_are_made_once_for_every_seed(made_at_once, tmp_path):
    first = tiny_models(tmp_path, BOTH, seed=1, **QUIET)
    assert tiny_models(tmp_path, BOTH, seed=1, **QUIET) == first
    assert tiny_models(tmp_path, BOTH, seed=2, **QUIET) != first
    assert made_at_once == [1, 2]
    assert tiny_models(tmp_path, ["judge"], seed=1, **QUIET)[0].is_dir()
    assert all(folder.is_dir() for folder in first)


def test_half_made_models_are_not_taken(monkeypatch, tmp_path):
    def fail(folder: Path, names: Sequence[str], **_: object) -> None:
        (folder / "policy").mkdir(parents=True)
        raise WarmUpError("killed")

    monkeypatch.setattr(warmup, "_warm_up", fail)
    with pytest.raises(WarmUpError):
        tiny_models(tmp_path, BOTH, seed=1, **QUIET)
    assert not list(tmp_path.iterdir())


def test_slower_of_two_takes_what_the_faster_made(monkeypatch, made_at_once, tmp_path):
    slow = warmup._warm_up

    def overtaken(folder: Path, names: Sequence[str], **options: object) -> None:
        monkeypatch.setattr(warmup, "_warm_up", slow)
        tiny_models(tmp_path, names, **options)
        slow(folder, names, **options)

    monkeypatch.setattr(warmup, "_warm_up", overtaken)
    policy, judge = tiny_models(tmp_path, BOTH, seed=1, **QUIET)
    assert policy.is_dir() and judge.is_dir()
    assert list(tmp_path.iterdir()) == [policy.parent]


def test_failing_training_says_why(tmp_path):
    with pytest.raises(WarmUpError, match="nobody"):
        tiny_models(tmp_path, ("policy", "nobody"), seed=1, **QUIET)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda end: end.name)
def test_trainings_end_with_the_process_that_started_them(end, tmp_path):
    code = (
        "from pathlib import Path; from verl_fapo.demo.warmup import tiny_models;"
        f"tiny_models(Path({str(tmp_path)!r}), {BOTH!r}, seed=1, say=lambda text: None)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    children = wait_for_children(process.pid)
    os.kill(process.pid, end)
    process.wait(30)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    if end is signal.SIGINT:
        assert not list(tmp_path.iterdir())


def wait_for_children(pid: int) -> list[psutil.Process]:
    for _ in range(300):
        children = psutil.Process(pid).children()
        if len(children) == 2:
            return children
        time.sleep(0.1)
    raise AssertionError("the trainings did not start")


def test_policy_is_half_right_often_flawed_and_sure_of_the_right_step(models):
    rates, _ = measure_policy(Writer(models[0]), list(islice(problems("test", seed=1), NUM_PROBLEMS)))
    assert 0.3 <= rates["right"] <= 0.6
    assert 0.2 <= rates["flawed among right"] <= 0.4
    assert rates["greedy right"] > 0.85


def test_judge_finds_the_flaws_of_the_policy(models):
    _, right = measure_policy(Writer(models[0]), list(islice(problems("test", seed=1), NUM_PROBLEMS)))
    rates = measure_judge(Writer(models[1]), right)
    assert rates["F1"] > rates["F1 of always flawed"] + 0.2
    assert rates["unknown"] < 0.02


def test_judge_leaves_right_solutions_alone(models):
    asked = list(islice(problems("test", seed=2), NUM_PROBLEMS))
    rates = measure_judge(Writer(models[1]), [(problem, solution(problem)) for problem in asked])
    assert rates["clean called flawed"] < 0.05
