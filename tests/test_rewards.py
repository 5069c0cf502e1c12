from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_fapo.critique import UnknownReason, Verdict
from verl_fapo.rewards import (
    counts_as_flawed,
    fapo_reward,
    fapo_rewards,
    genrm_reward,
    genrm_rewards,
    outcome_reward,
    overlong_penalties,
    overlong_penalty,
)

CLEAN, FLAWED, UNKNOWN = Verdict(index=-1), Verdict(index=2), Verdict(reason=UnknownReason.TIMEOUT)

FAPO_CASES = [
    # correct, verdict, penalty, on_unknown, reward
    pytest.param(True, CLEAN, 1.0, "keep", 1.0, id="right and clean"),
    pytest.param(True, FLAWED, 1.0, "keep", 0.0, id="right and flawed"),
    pytest.param(True, FLAWED, 0.0, "keep", 1.0, id="penalty 0 is the outcome reward"),
    pytest.param(True, FLAWED, 2.0, "keep", -1.0, id="penalty 2 makes it as bad as wrong"),
    pytest.param(True, Verdict(index=0), 1.0, "keep", 0.0, id="flawed in the first paragraph"),
    pytest.param(True, UNKNOWN, 1.0, "keep", 1.0, id="unknown keeps the rule's reward"),
    pytest.param(True, UNKNOWN, 1.0, "neutral", 1.0, id="what is left out has the rule's reward"),
    pytest.param(True, UNKNOWN, 1.0, "penalise", 0.0, id="unknown counts as flawed"),
    pytest.param(True, None, 1.0, "penalise", 1.0, id="not judged"),
    pytest.param(False, None, 1.0, "keep", -1.0, id="wrong"),
    pytest.param(False, FLAWED, 1.0, "penalise", -1.0, id="a wrong answer's verdict is ignored"),
]

GENRM_CASES = [
    # verdict, true index, paragraphs, reward
    pytest.param(CLEAN, -1, 4, 1.0, id="both clean"),
    pytest.param(CLEAN, 0, 4, -1.0, id="missed the flaw"),
    pytest.param(Verdict(index=0), -1, 4, -1.0, id="false alarm"),
    pytest.param(Verdict(index=2), 2, 4, 1.0, id="named the paragraph"),
    pytest.param(Verdict(index=1), 2, 4, 0.75, id="one before it"),
    pytest.param(Verdict(index=3), 2, 4, 0.75, id="one after it"),
    pytest.param(Verdict(index=0), 3, 4, 0.25, id="first for last is 1/n"),
    pytest.param(Verdict(index=3), 0, 4, 0.25, id="last for first is 1/n"),
    pytest.param(Verdict(index=0), 0, 1, 1.0, id="the only paragraph"),
    pytest.param(CLEAN, -1, 1, 1.0, id="the only paragraph is right"),
    pytest.param(Verdict(index=4), 3, 4, -1.0, id="one past the last paragraph"),
    pytest.param(Verdict(index=-2), -1, 4, -1.0, id="below -1"),
    pytest.param(UNKNOWN, -1, 4, -1.0, id="unknown of a right solution"),
    pytest.param(UNKNOWN, 2, 4, -1.0, id="unknown of a flawed solution"),
]

OVERLONG_CASES = [
    # length, max response, buffer, factor, penalty
    pytest.param(0, 20, 8, 1.0, 0.0, id="empty"),
    pytest.param(12, 20, 8, 1.0, 0.0, id="up to the buffer"),
    pytest.param(13, 20, 8, 1.0, -0.125, id="one token into it"),
    pytest.param(16, 20, 8, 0.5, -0.25, id="half of it"),
    pytest.param(20, 20, 8, 1.0, -1.0, id="at the limit"),
    pytest.param(20, 20, 8, 3.0, -3.0, id="at the limit it is the factor"),
    pytest.param(24, 20, 8, 1.0, -1.5, id="beyond the limit it is not clamped"),
    pytest.param(20, 20, 8, 0.0, 0.0, id="factor 0"),
    pytest.param(1, 20, 20, 1.0, -0.05, id="all buffer"),
]


@pytest.mark.parametrize(("correct", "verdict", "penalty", "on_unknown", "reward"), FAPO_CASES)
def test_fapo_reward(correct, verdict, penalty, on_unknown, reward):
    assert fapo_reward(correct, verdict, penalty=penalty, on_unknown=on_unknown) == reward


@pytest.mark.parametrize(("verdict", "true_index", "num_paragraphs", "reward"), GENRM_CASES)
def test_genrm_reward(verdict, true_index, num_paragraphs, reward):
    assert genrm_reward(verdict, true_index, num_paragraphs=num_paragraphs) == reward


@pytest.mark.parametrize(("length", "max_response", "buffer", "factor", "penalty"), OVERLONG_CASES)
def test_overlong_penalty(length, max_response, buffer, factor, penalty):
    assert overlong_penalty(length, max_response=max_response, buffer=buffer, factor=factor) == penalty


@given(
    correct=st.booleans(),
    verdict=st.sampled_from([None, CLEAN, FLAWED, UNKNOWN]),
    on_unknown=st.sampled_from(["keep", "neutral", "penalise"]),
)
def test_penalty_0_is_the_outcome_reward(correct, verdict, on_unknown):
    assert fapo_reward(correct, verdict, penalty=0, on_unknown=on_unknown) == outcome_reward(correct)


def rounded(values: list[float]) -> list[float]:
    """As float32 holds them."""
    return torch.tensor(values, dtype=torch.float64).float().tolist()


@pytest.mark.parametrize("on_unknown", ["keep", "penalise"])
@pytest.mark.parametrize("penalty", [0.0, 0.1, 1 / 3, 1, 1.7, 2.0])
def test_batched_fapo_rewards_are_the_scalar_ones(penalty, on_unknown):
    rng = random.Random(f"{penalty} {on_unknown}")
    correct = rng.choices([True, False], k=300)
    verdicts = rng.choices([None, CLEAN, FLAWED, UNKNOWN], k=300)
    flawed = [counts_as_flawed(verdict, on_unknown=on_unknown) for verdict in verdicts]
    rewards = fapo_rewards(torch.tensor(correct), torch.tensor(flawed), penalty=penalty)
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == rounded(
        [fapo_reward(c, v, penalty=penalty, on_unknown=on_unknown) for c, v in zip(correct, verdicts, strict=True)]
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float32])
def test_batched_genrm_rewards_are_the_scalar_ones(dtype):
    rng = random.Random(0)
    sizes = [rng.choice([1, 2, 3, 7, 40]) for _ in range(2000)]
    truths = [rng.randrange(-1, n) for n in sizes]
    indices = [rng.randrange(-3, n + 2) for n in sizes]
    rewards = genrm_rewards(*(torch.tensor(values, dtype=dtype) for values in (indices, truths, sizes)))
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == rounded(
        [
            genrm_reward(Verdict(index=index), truth, num_paragraphs=n)
            for index, truth, n in zip(indices, truths, sizes, strict=True)
        ]
    )


def test_an_unknown_verdict_is_any_index_outside_the_paragraphs():
    rewards = genrm_rewards(torch.tensor([-2, 3, 99]), torch.tensor([-1, 2, 0]), torch.tensor([3, 3, 3]))
    assert rewards.tolist() == [genrm_reward(UNKNOWN, truth, num_paragraphs=3) for truth in (-1, 2, 0)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
def test_batched_overlong_penalties_are_the_scalar_ones(dtype):
    rng = random.Random(0)
    for _ in range(100):
        max_response = rng.randint(1, 200)
        shape = {"max_response": max_response, "buffer": rng.randint(1, max_response), "factor": rng.uniform(0, 3)}
        lengths = [0, max_response - shape["buffer"], max_response, *(rng.randint(0, 250) for _ in range(20))]
        penalties = overlong_penalties(torch.tensor(lengths, dtype=dtype), **shape)
        assert penalties.dtype == torch.float32
        assert penalties.tolist() == rounded([overlong_penalty(length, **shape) for length in lengths])


@given(n=st.integers(1, 60), data=st.data())
def test_genrm_reward_is_larger_the_nearer_the_paragraph(n, data):
    truth, near, far = (data.draw(st.integers(0, n - 1)) for _ in range(3))
    near, far = sorted((near, far), key=lambda index: abs(index - truth))
    rewards = [genrm_reward(Verdict(index=index), truth, num_paragraphs=n) for index in (truth, near, far)]
    assert 1.0 == rewards[0] >= rewards[1] >= rewards[2] >= 1 - (n - 1) / n > 0


def test_empty_batches():
    none = torch.zeros(0, dtype=torch.long)
    assert fapo_rewards(none.bool(), none.bool(), penalty=1.0).tolist() == []
    assert genrm_rewards(none, none, none).tolist() == []
    assert overlong_penalties(none, max_response=20, buffer=8).tolist() == []


@pytest.mark.parametrize("penalty", [-0.1, 2.1, math.nan, math.inf])
def test_penalty_out_of_range_is_refused(penalty):
    yes = torch.tensor([True])
    with pytest.raises(ValueError, match=r"penalty is .*expected a number in \[0, 2\]"):
        fapo_reward(True, CLEAN, penalty=penalty)
    with pytest.raises(ValueError, match=r"penalty is .*expected a number in \[0, 2\]"):
        fapo_rewards(yes, yes, penalty=penalty)


def test_a_misspelt_policy_for_unknown_verdicts_is_refused():
    with pytest.raises(ValueError, match="on_unknown is 'penalize', expected one of keep, neutral, penalise"):
        fapo_reward(True, UNKNOWN, penalty=1.0, on_unknown="penalize")


@pytest.mark.parametrize(("true_index", "num_paragraphs"), [(-2, 3), (3, 3), (-1, 0), (0, 0)])
def test_a_true_index_that_names_no_paragraph_is_refused(true_index, num_paragraphs):
    with pytest.raises(ValueError, match=f"true_index is {true_index}, expected"):
        genrm_reward(CLEAN, true_index, num_paragraphs=num_paragraphs)
    with pytest.raises(ValueError, match=f"row 1: true_index is {true_index} of {num_paragraphs} paragraphs"):
        genrm_rewards(torch.tensor([0, 0]), torch.tensor([0, true_index]), torch.tensor([1, num_paragraphs]))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        pytest.param({"max_response": 20, "buffer": 0}, "buffer is 0", id="no buffer"),
        pytest.param({"max_response": 20, "buffer": 21}, "buffer is 21, expected 1 to max_response", id="large buffer"),
        pytest.param({"max_response": 20, "buffer": 8, "factor": -1.0}, "factor is -1.0", id="negative factor"),
        pytest.param({"max_response": 20, "buffer": 8, "factor": math.nan}, "factor is nan", id="no number"),
        pytest.param({"max_response": 20, "buffer": 8, "factor": math.inf}, "factor is inf", id="endless"),
    ],
)
def test_an_impossible_buffer_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(1, **shape)
    with pytest.raises(ValueError, match=message):
        overlong_penalties(torch.tensor([1]), **shape)


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="length is -1"):
        overlong_penalty(-1, max_response=20, buffer=8)
    with pytest.raises(ValueError, match="shortest of lengths is -1"):
        overlong_penalties(torch.tensor([3, -1]), max_response=20, buffer=8)


TWO, THREE, SQUARE = torch.zeros(2), torch.zeros(3), torch.zeros(2, 2)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: fapo_rewards(TWO.bool(), THREE.bool(), penalty=1.0), id="fapo"),
        pytest.param(lambda: fapo_rewards(SQUARE.bool(), SQUARE.bool(), penalty=1.0), id="fapo, two axes"),
        pytest.param(lambda: genrm_rewards(TWO, TWO, THREE), id="genrm"),
        pytest.param(lambda: genrm_rewards(TWO, TWO, torch.tensor(3)), id="genrm, no broadcasting"),
        pytest.param(lambda: overlong_penalties(SQUARE, max_response=20, buffer=8), id="overlong"),
    ],
)
def test_shapes_that_do_not_match_are_refused(call):
    with pytest.raises(ValueError, match=r"expected tensors of one shape \[B\]"):
        call()


def test_numbers_for_bools_are_refused():
    with pytest.raises(ValueError, match=r"expected torch\.bool"):
        fapo_rewards(TWO, TWO.bool(), penalty=1.0)


def test_what_is_no_number_is_refused_or_unknown():
    nan, zero, three = torch.tensor([math.nan]), torch.zeros(1), torch.tensor([3.0])
    with pytest.raises(ValueError, match="row 0: true_index is nan"):
        genrm_rewards(zero, nan, three)
    with pytest.raises(ValueError, match="of nan paragraphs"):
        genrm_rewards(zero, zero, nan)
    assert genrm_rewards(nan, zero, three).tolist() == [-1.0]
    with pytest.raises(ValueError, match="shortest of lengths is nan"):
        overlong_penalties(nan, max_response=20, buffer=8)
