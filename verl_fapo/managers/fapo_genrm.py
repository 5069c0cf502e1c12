"""The reward manager ``fapo_genrm``: trains a judge, on solutions whose first wrong paragraph is known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from verl_fapo.critique import UnknownReason, Verdict, parse_verdict
from verl_fapo.rewards import genrm_reward
from verl_fapo.rollout import Rollout, overlong, read_rollout
from verl_fapo.run_folder import RolloutLog
from verl_fapo.settings import read_settings
from verl_fapo.templates import tagged_paragraphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What is known about the solution that a rollout judges."""

    paragraphs: tuple[str, ...]
    """Those of the prompt, between its tags."""

    num_paragraphs: int
    true_index: int
    """The first wrong one, from 0; -1 if all are right."""


@register("fapo_genrm")
class FAPOGenRMRewardManager(RewardManagerBase):
    """Scores a critique by its verdict: right or wrong, and how near to the first wrong paragraph (arXiv:2510.22543).

    A row's ``reward_model.ground_truth`` is the index of the first wrong paragraph or -1, as in FAPO-Critic; the number
    of paragraphs is ``extra_info.total_steps``, or what the prompt's tags say. A critique that is cut off has no
    verdict. It never raises, like the manager ``fapo``.
    """

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        settings = read_settings(config)
        self._overlong = settings.overlong
        self._max_response = config.data.max_response_length
        self._log = RolloutLog(Path(settings.run_dir))

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score the last sequence of ``data``.

        Returns:
            ``reward_score``, and ``reward_extra_info`` with the keys of :func:`extras`, always the same.
        """
        try:
            return await asyncio.to_thread(self._score, data[-1:][0])
        except Exception:  # any row, tokenizer or disk may be broken; see the class
            logger.exception("verl_fapo could not score a critique")
            return {"reward_score": -1.0, "reward_extra_info": extras(Verdict(reason=UnknownReason.ERROR), -1)}

    def _score(self, item: Any) -> dict[str, Any]:
        rollout = read_rollout(item, self.tokenizer)
        lesson = read_lesson(rollout)
        verdict = Verdict(reason=UnknownReason.TRUNCATED)
        if not self._is_cut_off(item, rollout):
            verdict = parse_verdict(rollout.solution, num_paragraphs=lesson.num_paragraphs)
        length = overlong(self._overlong, rollout.num_tokens, max_response=self._max_response)
        reward = length + genrm_reward(verdict, lesson.true_index, num_paragraphs=lesson.num_paragraphs)
        try:
            self._log.write(record(rollout, lesson, verdict) | {"reward": reward, "reward_for_length": length})
        except OSError:  # a full disk is no reason for another reward
            logger.exception("verl_fapo could not record critique %s", rollout.id)
        return {"reward_score": reward, "reward_extra_info": extras(verdict, lesson.true_index)}

    def _is_cut_off(self, item: Any, rollout: Rollout) -> bool:
        last = int(item.batch["responses"][rollout.num_tokens - 1]) if rollout.num_tokens else None
        return rollout.num_tokens >= self._max_response and last != self.tokenizer.eos_token_id


def read_lesson(rollout: Rollout) -> Lesson:
    """What the rollout's row says about the solution.

    Raises:
        ValueError: the label is no index of a paragraph.
    """
    extra_info = rollout.row.get("extra_info")
    paragraphs = tuple(tagged_paragraphs(prompt_text(rollout.row)))
    total = extra_info.get("total_steps") if isinstance(extra_info, Mapping) else None
    label = float(rollout.ground_truth)  # parquet makes doubles of a column of integers with a gap
    if not label.is_integer():
        raise ValueError(f"ground_truth is {rollout.ground_truth}, expected the index of a paragraph, or -1")
    return Lesson(
        paragraphs=paragraphs,
        num_paragraphs=len(paragraphs) if total is None else int(total),
        true_index=int(label),
    )


def prompt_text(row: Mapping[str, Any]) -> str:
    """What the judge was asked: the last message."""
    return str(list(row["raw_prompt"])[-1]["content"])


def extras(verdict: Verdict, true_index: int) -> dict[str, float | str]:
    """What goes along with the reward: the same keys and types for every critique, as veRL needs them."""
    called, flawed = verdict.kind == "flawed", true_index >= 0
    return {
        "acc": float(verdict.kind != "unknown" and called == flawed),
        "judged": 1.0,
        "flawed": float(called),
        "unknown": float(verdict.kind == "unknown"),
        "reason": verdict.reason.value if verdict.reason else "",
        "truly_flawed": float(flawed),
        "distance": float(abs(verdict.index - true_index)) if called and flawed else 0.0,
    }


def record(rollout: Rollout, lesson: Lesson, verdict: Verdict) -> dict[str, Any]:
    """The critique's line in the run folder, but for its reward."""
    return {
        "id": rollout.id,
        "step": rollout.step,
        "validation": rollout.validation,
        "problem": prompt_text(rollout.row),
        "solution": "\n\n".join(lesson.paragraphs),
        "ground_truth": str(lesson.true_index),
        "answer": None if verdict.index is None else str(verdict.index),
        "correct": verdict.kind != "unknown" and (verdict.kind == "flawed") == (lesson.true_index >= 0),
        "method": "verdict",
        "judged": True,
        "critique": rollout.solution,
        "verdict": verdict.kind,
        "index": verdict.index,
        "reason": verdict.reason.value if verdict.reason else None,
        "judge_seconds": 0.0,
        "from_memory": False,
    }
