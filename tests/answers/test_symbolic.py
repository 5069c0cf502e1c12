from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from verl_fapo.answers import symbolic
from verl_fapo.answers.symbolic import SymbolicWorker


@pytest.fixture
def worker():
    worker = SymbolicWorker()
    yield worker
    worker.close()


EQUAL = [
    pytest.param("\\sec^2(y)", "\\tan^2(y)+1", True, id="identity"),
    pytest.param("\\frac{1}{\\sqrt{n}}", "\\sqrt{1/n}", True, id="equal where both are real"),
    pytest.param("x", "|x|", False, id="equal for one sign only"),
    pytest.param("\\ln(x^2)", "2\\ln(x)", False, id="one has a value where the other has none"),
    pytest.param("\\frac{1}{2^{98}}", "\\frac{1}{2^{99}}", False, id="tiny numbers"),
    pytest.param("\\sqrt{2}", "\\sqrt{2}+10^{-200}", False, id="a tiny difference"),
    pytest.param("0.1+x", "\\frac{1}{10}+x", True, id="decimals are exact"),
    pytest.param("2e", "2\\exp(1)", True, id="constant e"),
    pytest.param("i^2x", "-x", True, id="imaginary unit"),
    pytest.param("\\sin(30^\\circ)", "\\frac{1}{2}", True, id="degrees"),
    pytest.param("f(x)", "f(y)", None, id="unknown functions"),
    pytest.param("2^{n^2}+1", "2^{n^2}", False, id="a small term beside a large one"),
    pytest.param("e^{x^2}+5", "e^{x^2}", False, id="a constant beside a large one"),
    pytest.param("2025^{2025}+1", "2025^{2025}", None, id="numbers too large to tell"),
    pytest.param("|x-1|+|x+1|", "2|x|", False, id="absolute values near 0"),
    pytest.param("\\sqrt{(x^2-1)^2}", "x^2-1", False, id="root between -1 and 1"),
    pytest.param("\\max(x^2,x)", "x^2", False, id="maximum between 0 and 1"),
    pytest.param("|a|+|b|", "|a+b|", False, id="absolute values of both signs"),
    pytest.param("|ab|", "ab", False, id="sign of a product"),
    pytest.param("|b|-|a|", "|b-a|", False, id="order of two unknowns"),
    pytest.param("\\lceil n/2\\rceil", "\\lfloor n/2\\rfloor+1", False, id="rounding of even numbers"),
    pytest.param("\\lceil n\\rceil-1", "\\lfloor n\\rfloor", False, id="rounding of integers"),
    pytest.param("0.5x", "\\frac{x}{2}", True, id="decimal before an unknown"),
    pytest.param("0.5n(n+1)", "\\frac{n(n+1)}{2}", True, id="decimal before a product"),
    pytest.param("x+", "x", None, id="malformed"),
    pytest.param("x^2+2x+1", "y^2+2y+1", False, id="another variable"),
]


@pytest.mark.parametrize(("gold", "answer", "equal"), EQUAL)
def test_expressions_are_equal_where_they_have_values(gold, answer, equal):
    assert symbolic.WORKER.ask("equal", gold, answer, seconds=30) is equal


RELATIONS = [
    pytest.param(("2x+4y-3", "=", "0"), ("y", "=", "-\\frac{1}{2}x+\\frac{3}{4}"), True, id="the same line"),
    pytest.param(("2x+4y-3", "=", "0"), ("y", "=", "\\frac{1}{2}x+\\frac{3}{4}"), False, id="another line"),
    pytest.param(("x", "<", "5"), ("-2x", ">", "-10"), True, id="turned round"),
    pytest.param(("x", "<", "5"), ("-2x", "<", "-10"), False, id="not turned round"),
    pytest.param(("x", "<", "5"), ("x", "<=", "5"), False, id="another end"),
    pytest.param(("1", "=", "1"), ("2", "=", "2"), False, id="no unknown"),
]


@pytest.mark.parametrize(("gold", "answer", "same"), RELATIONS)
def test_relations_are_the_same_up_to_a_factor(gold, answer, same):
    assert symbolic.WORKER.ask("relation", "\t".join(gold), "\t".join(answer), seconds=30) is same


def test_question_that_takes_too_long_is_ended_and_the_next_one_answered(worker):
    assert worker.ask("equal", "x", "x", seconds=30) is True
    first = worker._process.pid
    with pytest.raises(TimeoutError, match=r"within 0.5 s"):
        worker.ask("equal", "9^{9^{9^{9}}}", "5", seconds=0.5)
    assert not psutil.pid_exists(first)
    assert worker.ask("equal", "2x", "x+x", seconds=30) is True


def test_memory_is_bounded(worker):
    worker.ask("equal", "x", "x", seconds=30)
    limit = int(psutil.Process(worker._process.pid).rlimit(psutil.RLIMIT_AS)[0])
    assert 0 < limit <= 4 * 2**30


def test_killed_process_is_replaced(worker):
    worker.ask("equal", "x", "x", seconds=30)
    worker._process.kill()
    worker._process.wait()
    assert worker.ask("equal", "x", "x", seconds=30) is True


def test_process_that_does_not_start_is_told_once_and_nothing_is_equal(worker, monkeypatch, caplog):
    monkeypatch.setattr(symbolic, "COMMAND", [sys.executable, "-c", "raise SystemExit(1)"])
    for _ in range(2):
        with pytest.raises(TimeoutError, match="does not start"):
            worker.ask("equal", "x", "x", seconds=5)
    assert caplog.text.count("without Math-Verify") == 1


@pytest.mark.parametrize("end", ["pass", "import os; os.kill(os.getpid(), 9)"], ids=["ends", "is killed"])
def test_process_ends_with_the_one_that_asked(end):
    ask = "from verl_fapo.answers.symbolic import WORKER as w; w.ask('equal', 'x', 'x', seconds=30)"
    code = f"{ask}; print(w._process.pid, flush=True); {end}"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(asked.stdout)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)
