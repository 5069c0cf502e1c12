"""The reward manager ``fapo``: rule verdict, judge, FAPO reward, for one rollout at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from verl_fapo.answers import Verification, verify
from verl_fapo.critique import UnknownReason, Verdict
from verl_fapo.data import problem_text
from verl_fapo.judge import JudgeClient, Judgement
from verl_fapo.memory import VerdictMemory
from verl_fapo.rewards import fapo_reward
from verl_fapo.rollout import Rollout, overlong, read_rollout
from verl_fapo.run_folder import VERDICTS, RolloutLog
from verl_fapo.settings import FAPOSettings, read_settings

logger = logging.getLogger(__name__)

NOT_JUDGED = Judgement(verdict=Verdict(index=-1), critique="", seconds=0.0)


@register("fapo")
class FAPORewardManager(RewardManagerBase):
    """Scores a rollout: +1 or -1 by its final answer, less the penalty if the judge finds right reasoning missing.

    Right answers go to the judge as soon as they are generated, while other rollouts are still under way; those of
    validation only with ``fapo.judge.validation``, and none with ``fapo.genrm.placement=none``. It never raises: veRL
    would drop the rollout's whole group and train on the rest.
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
        self._settings = read_settings(config)
        self._judge = judge_client(self._settings)
        self._max_response = config.data.max_response_length
        self._log = RolloutLog(Path(self._settings.run_dir))

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score the last sequence of ``data``.

        Returns:
            ``reward_score``, and ``reward_extra_info`` with the keys of :func:`extras`, all numbers, always the same.
        """
        generated_at = time.time()
        try:
            rollout = await asyncio.to_thread(read_rollout, data[-1:][0], self.tokenizer)
            reward, correct, judgement = await self._score(rollout)
        except Exception:  # any row, tokenizer or disk may be broken; see the class
            logger.exception("verl_fapo could not score a rollout")
            judgement = Judgement(verdict=Verdict(reason=UnknownReason.ERROR), critique="", seconds=0.0)
            reward, correct = -1.0, False
        return {"reward_score": reward, "reward_extra_info": extras(correct, judgement, generated_at=generated_at)}

    async def _score(self, rollout: Rollout) -> tuple[float, bool, Judgement | None]:
        verification = await asyncio.to_thread(
            verify, rollout.solution, rollout.ground_truth, options=self._settings.answer
        )
        judgement = None
        if self._judge and verification.correct and (self._settings.judge.validation or not rollout.validation):
            judgement = await self._judge_rollout(rollout)
        length = overlong(self._settings.overlong, rollout.num_tokens, max_response=self._max_response)
        reward = length + fapo_reward(
            verification.correct,
            judgement.verdict if judgement else None,
            penalty=self._settings.penalty,
            on_unknown=self._settings.judge.on_unknown,
        )
        line = record(rollout, verification, judgement) | {"reward": reward, "reward_for_length": length}
        try:
            await asyncio.to_thread(self._log.write, line)
        except OSError:  # a full disk is no reason for another reward
            logger.exception("verl_fapo could not record rollout %s", rollout.id)
        return reward, verification.correct, judgement

    async def _judge_rollout(self, rollout: Rollout) -> Judgement:
        try:
            return await self._judge.judge(
                problem=problem_text(rollout.row), reference=rollout.ground_truth, solution=rollout.solution
            )
        except Exception as exc:  # a row without a problem, or a fault of ours: no verdict, and the rule's reward
            logger.exception("verl_fapo could not judge rollout %s", rollout.id)
            return Judgement(verdict=Verdict(reason=UnknownReason.ERROR), critique=repr(exc), seconds=0.0)


def judge_client(settings: FAPOSettings) -> JudgeClient | None:
    """The judge, with its memory; None where nothing is judged."""
    if settings.genrm.placement == "none":
        return None
    memory = None
    if settings.memory.max_entries:
        path = settings.memory.path or Path(settings.run_dir, VERDICTS)
        memory = VerdictMemory(Path(path), max_entries=settings.memory.max_entries)
    return JudgeClient(
        settings.judge, settings.genrm.endpoints[0], memory=memory, checkpoint=settings.memory.checkpoint or ""
    )


def extras(correct: bool, judgement: Judgement | None, *, generated_at: float) -> dict[str, float | str]:
    """What goes along with the reward: the same keys and types for every rollout, as veRL needs them."""
    verdict, judged = (judgement or NOT_JUDGED).verdict, judgement is not None
    return {
        "acc": float(correct),
        "judged": float(judged),
        "flawed": float(judged and verdict.kind == "flawed"),
        "unknown": float(judged and verdict.kind == "unknown"),
        "reason": verdict.reason.value if verdict.reason else "",
        "from_memory": float((judgement or NOT_JUDGED).from_memory),
        "judge_seconds": (judgement or NOT_JUDGED).seconds,
        "judge_tokens": float((judgement or NOT_JUDGED).tokens),
        "generated_at": generated_at,
        "scored_at": time.time(),
    }


def record(rollout: Rollout, verification: Verification, judgement: Judgement | None) -> dict[str, Any]:
    """The rollout's line in the run folder, but for its reward."""
    judged, judgement = judgement is not None, judgement or NOT_JUDGED
    verdict = judgement.verdict
    readable = judged and verdict.reason is not UnknownReason.ERROR
    return {
        "id": rollout.id,
        "step": rollout.step,
        "validation": rollout.validation,
        "problem": problem_text(rollout.row) if readable else None,
        "solution": rollout.solution,
        "ground_truth": rollout.ground_truth,
        "answer": verification.answer,
        "correct": verification.correct,
        "method": verification.method.value,
        "judged": judged,
        "critique": judgement.critique,
        "verdict": verdict.kind if judged else None,
        "index": verdict.index if judged else None,
        "reason": verdict.reason.value if verdict.reason else None,
        "judge_seconds": round(judgement.seconds, 3),
        "from_memory": judgement.from_memory,
    }
