"""Rewards of FAPO (arXiv:2510.22543) and DAPO's overlong shaping, for one rollout and for a batch.

The batched forms compute in double precision and round once: [B] float32, the values of the scalar forms.
``B`` is the number of rollouts; it may be 0.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from verl_fapo.critique import Verdict
from verl_fapo.settings import OnUnknown
from verl_fapo.theory import check_penalty

ON_UNKNOWN = get_args(OnUnknown)


def outcome_reward(correct: bool) -> float:
    """+1 for a right final answer, -1 for a wrong one."""
    return 1.0 if correct else -1.0


def counts_as_flawed(verdict: Verdict | None, *, on_unknown: str = "keep") -> bool:
    """Whether a right answer with this verdict is treated as a flawed positive.

    Args:
        verdict: the judge's; None for a rollout that was not judged.
        on_unknown: ``penalise`` treats an unknown verdict as flawed; ``keep`` does not, nor does ``neutral``, under
            which the reward has no effect: see :mod:`verl_fapo.neutral`.
    """
    if on_unknown not in ON_UNKNOWN:
        raise ValueError(f"on_unknown is {on_unknown!r}, expected one of {', '.join(ON_UNKNOWN)}")
    if verdict is None:
        return False
    return verdict.kind == "flawed" or (verdict.kind == "unknown" and on_unknown == "penalise")


def fapo_reward(correct: bool, verdict: Verdict | None, *, penalty: float, on_unknown: str = "keep") -> float:
    """Outcome reward, less ``penalty`` if a right answer was reached by wrong reasoning.

    R_FAPO = R - lambda * [correct and flawed], with R = +1 for a right answer and -1 for a wrong one.

    Args:
        correct: the final answer matches the reference.
        verdict: as in :func:`counts_as_flawed`. A wrong answer's is ignored.
        penalty: lambda, in reward units, in [0, 2]; 0 is the outcome reward.
        on_unknown: as in :func:`counts_as_flawed`.

    Raises:
        ValueError: ``penalty`` is out of range, or ``on_unknown`` is no known word.

    Source: arXiv:2510.22543, section "Flawed positive penalization".
    """
    check_penalty(penalty)
    flawed = counts_as_flawed(verdict, on_unknown=on_unknown)
    return outcome_reward(correct) - penalty * (correct and flawed)


def fapo_rewards(correct: Tensor, flawed: Tensor, *, penalty: float) -> Tensor:
    """:func:`fapo_reward` of a batch.

    Args:
        correct: [B] bool, the final answer matches the reference.
        flawed: [B] bool, :func:`counts_as_flawed`; ignored where the answer is wrong.
        penalty: lambda, in reward units, in [0, 2]; 0 is the outcome reward.

    Returns:
        [B] float32, each 1, 1 - lambda or -1.

    Raises:
        ValueError: ``penalty`` is out of range, or the tensors are no bools of one shape [B].
    """
    check_penalty(penalty)
    _check_batch(correct=correct, flawed=flawed)
    if not correct.dtype == flawed.dtype == torch.bool:
        raise ValueError(f"correct is {correct.dtype} and flawed is {flawed.dtype}, expected torch.bool")
    right = torch.where(flawed, 1.0 - penalty, 1.0)
    return torch.where(correct, right, -1.0).float()


def genrm_reward(verdict: Verdict, true_index: int, *, num_paragraphs: int) -> float:
    """Reward of a judge in training: is the verdict right, and how near is the paragraph it names.

    +1 where both say clean, -1 where they disagree or the verdict is unknown (no index, or one that names no
    paragraph), and 1 - |predicted - true| / n where both say flawed: in [1/n, 1].

    Args:
        verdict: the judge's.
        true_index: the first wrong paragraph, from 0; -1 if all are right.
        num_paragraphs: n, of the judged solution.

    Raises:
        ValueError: ``num_paragraphs`` is below 1, or ``true_index`` is outside [-1, n).

    Source: arXiv:2510.22543, section "Flawed positive detection": outcome plus process reward.
    """
    if not -1 <= true_index < num_paragraphs or num_paragraphs < 1:
        raise ValueError(
            f"true_index is {true_index}, expected -1 to {num_paragraphs - 1} of {num_paragraphs} paragraphs"
        )
    predicted = verdict.index
    if predicted is None or not -1 <= predicted < num_paragraphs or (predicted < 0) != (true_index < 0):
        return -1.0
    return 1.0 - abs(predicted - true_index) / num_paragraphs


def genrm_rewards(predicted: Tensor, true_index: Tensor, num_paragraphs: Tensor) -> Tensor:
    """:func:`genrm_reward` of a batch.

    Args:
        predicted: [B] int, index of the verdict; whatever is outside [-1, n), -2 for instance, is unknown.
        true_index: [B] int, in [-1, n).
        num_paragraphs: [B] int, n, at least 1.

    Returns:
        [B] float32, each -1 or in (0, 1].

    Raises:
        ValueError: as in the scalar form, or the tensors are not of one shape [B].
    """
    _check_batch(predicted=predicted, true_index=true_index, num_paragraphs=num_paragraphs)
    # As doubles, which hold these integers exactly: narrow or unsigned ones would wrap around.
    predicted, true_index, n = predicted.double(), true_index.double(), num_paragraphs.double()
    good = (true_index >= -1) & (true_index < n) & (n >= 1)
    if not good.all():
        row = int((~good).nonzero()[0])
        raise ValueError(f"row {row}: true_index is {true_index[row]:g} of {n[row]:g} paragraphs, expected -1 to n - 1")
    agree = (predicted >= -1) & (predicted < n) & ((predicted < 0) == (true_index < 0))
    return torch.where(agree, 1.0 - (predicted - true_index).abs() / n, -1.0).float()


def overlong_penalty(length: int, *, max_response: int, buffer: int, factor: float = 1.0) -> float:
    """What a response loses for running into the buffer before the length limit, in reward units.

    0 up to ``max_response - buffer`` tokens, from there linear, ``-factor`` at ``max_response``. Added to the reward
    of right and wrong answers alike. Not clamped, as in veRL's DAPO reward manager: there no response is longer than
    ``max_response``, and one that were would lose more than ``factor``.

    Args:
        length: tokens of the response.
        max_response: the limit, in tokens.
        buffer: tokens before the limit over which the penalty grows, in [1, max_response].
        factor: reward units lost at the limit, at least 0.

    Raises:
        ValueError: a length is negative, or ``buffer`` or ``factor`` is out of range.

    Source: DAPO, arXiv:2503.14476, section "Overlong reward shaping".
    """
    _check_overlong(max_response, buffer, factor)
    if length < 0:
        raise ValueError(f"length is {length}, expected at least 0")
    return min(max_response - buffer - length, 0) / buffer * factor


def overlong_penalties(lengths: Tensor, *, max_response: int, buffer: int, factor: float = 1.0) -> Tensor:
    """:func:`overlong_penalty` of a batch: ``lengths`` [B] int to [B] float32, each at most 0."""
    _check_overlong(max_response, buffer, factor)
    _check_batch(lengths=lengths)
    if not (lengths >= 0).all():
        raise ValueError(f"the shortest of lengths is {lengths.min().item()}, expected at least 0")
    room = max_response - buffer - lengths.double()
    return (room.clamp(max=0) / buffer * factor).float()


def _check_overlong(max_response: int, buffer: int, factor: float) -> None:
    if not 1 <= buffer <= max_response:
        raise ValueError(f"buffer is {buffer}, expected 1 to max_response ({max_response})")
    if not 0 <= factor < float("inf"):
        raise ValueError(f"factor is {factor}, expected a finite number of at least 0")


def _check_batch(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"expected tensors of one shape [B], got {shapes}")
