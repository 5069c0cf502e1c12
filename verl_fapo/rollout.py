"""One row of veRL's batch, as the reward managers read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_fapo.rewards import overlong_penalty
from verl_fapo.settings import OverlongSettings

# The trainer puts it into the rows of validation: veRL does not tell a manager which those are.
VALIDATION_KEY = "fapo_validation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What a manager needs of it."""

    id: str
    """``uid_session``."""

    step: int
    """Training step that the rollout was generated for; 0 before the first."""

    validation: bool
    solution: str
    num_tokens: int
    ground_truth: str
    row: Mapping[str, Any]
    """The row of the data set, and what veRL added to it."""


def read_rollout(item: Any, tokenizer: Any) -> Rollout:
    """Read one row of veRL's batch (a ``DataProtoItem``)."""
    row = item.non_tensor_batch
    response_ids = item.batch["responses"]
    length = int(item.batch["attention_mask"][-response_ids.shape[-1] :].sum())
    ground_truth = row["reward_model"]["ground_truth"]
    if not isinstance(ground_truth, (str, int, float)) or ground_truth != ground_truth:
        raise TypeError(f"ground_truth is {ground_truth!r}, expected text or a number")
    return Rollout(
        id=f"{row['uid']}_{row.get('session_id', 0)}",
        step=int(row.get("global_steps", 0)),
        validation=bool(row.get(VALIDATION_KEY, False)),
        solution=tokenizer.decode(response_ids[:length], skip_special_tokens=True),
        num_tokens=length,
        ground_truth=str(ground_truth),
        row=row,
    )


def overlong(settings: OverlongSettings, num_tokens: int, *, max_response: int) -> float:
    """What a response loses for its length, if ``fapo.overlong`` is on."""
    if not settings.buffer:
        return 0.0
    return overlong_penalty(num_tokens, max_response=max_response, buffer=settings.buffer, factor=settings.factor)
