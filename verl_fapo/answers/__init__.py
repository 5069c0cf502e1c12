r"""Is the final answer of a solution right? :func:`verify` says, by the contract of docs/answers.md."""

from verl_fapo.answers.boxes import final_answer
from verl_fapo.answers.comparison import Method
from verl_fapo.answers.verification import Verification, verify
from verl_fapo.settings import AnswerSettings

__all__ = ["AnswerSettings", "Method", "Verification", "final_answer", "verify"]
