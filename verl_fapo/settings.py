"""The ``fapo:`` block of a composed veRL config, as one checked, frozen tree."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator

from verl_fapo.errors import SettingsError
from verl_fapo.theory import penalty_from_rho_shift

# Strict: True is no number.
Number = Annotated[float, Strict()]
Count = Annotated[int, Strict()]


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AnswerSettings(Settings):
    """What counts as the same answer, where that is a matter of contract; docs/answers.md shows each with examples."""

    units: Literal["optional", "required"] = "optional"
    """A unit, degrees and money included, may stand on one side only; two units must always agree."""

    percent: Literal["optional", "required", "fraction"] = "optional"
    """``10%`` is 10 or 0.1 (optional), only 10% (required), or 0.1 (fraction)."""

    base_suffix: Literal["optional", "required"] = "optional"
    """``2516_8`` may be written 2516."""

    decimals: Annotated[int, Strict()] | None = Field(None, ge=0, le=30)
    """Numbers are equal if they differ by less than half a unit of this decimal place; unset, if they are equal."""

    decimal_digits: Count = Field(12, ge=3)
    """A decimal of so many significant digits stands for every value that it was rounded or cut from."""

    decimal_comma: bool = True
    """``3,14`` is also 3.14; ``3,140`` never is."""

    mixed_numbers: bool = True
    """``1\\frac{1}{2}`` is 3/2; off, it is no number."""

    relations_as_intervals: bool = True
    """``0 < x < 5`` and ``(0, 5)`` are the same."""

    equivalent_equations: bool = True
    """Equations and inequalities that differ by a constant factor are the same; off, only the same text is."""

    ordered: bool = False
    """The order of a list without brackets counts; that of a tuple always does, that of a set never."""

    letter_with_text: bool = True
    """``C: the text of the option`` is C."""

    timeout_seconds: Number = Field(3.0, gt=0, le=3600)
    """Longest time for one question to Math-Verify; an answer that takes longer is not right."""


OnUnknown = Literal["keep", "neutral", "penalise"]


class JudgeSettings(Settings):
    model: str | None = None
    """Checkpoint of the GenRM: a folder or a hub name. With ``placement: external``, the name the server gives it."""

    template: str = Field("paragraphs", min_length=1)
    """Prompt: ``paragraphs`` (the solution cut into indexed ones), ``raw`` (as it is), or the path of a template file,
    which on a cluster every node must see."""

    scope: Literal["whole", "after_think"] = "whole"
    """What of a solution is judged: all of it, or what follows its thinking block."""

    samples: Count = Field(1, ge=1)
    """Critiques of one solution; its verdict is the majority's of more than half of them, or unknown."""

    temperature: Number = Field(0.6, ge=0)
    """Sampling temperature of a critique."""

    top_p: Number = Field(0.95, gt=0, le=1)
    """Nucleus of a critique."""

    max_tokens: Count = Field(16384, gt=0)
    """Longest critique, in tokens; one that is cut off there has no verdict."""

    timeout_seconds: Number = Field(600.0, gt=0)
    """Longest time for one verdict, retries included."""

    on_unknown: OnUnknown = "keep"
    """A right answer without a verdict: it keeps the rule's reward; it is left out of its group's mean and std, and has
    advantage 0; or it is treated as flawed."""

    max_unknown_rate: Number = Field(0.5, ge=0, le=1)
    """Training stops when a larger share of judgements than this gives no verdict; 1 never stops."""

    above_max_unknown_rate: Literal["stop", "warn"] = "stop"
    """What happens then."""

    validation: bool = False
    """Judge the right answers of validation too; they have no part in ``max_unknown_rate``."""

    @model_validator(mode="after")
    def check_samples(self) -> JudgeSettings:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples is {self.samples} but temperature is 0, at which all would be the same; set temperature "
                "above 0, or samples to 1"
            )
        return self


class GenRMSettings(Settings):
    placement: Literal["standalone", "external", "none"] = "standalone"
    """Start replicas on devices of their own, use servers that run already (``endpoints``), or judge nothing."""

    engine: Literal["vllm", "sglang"] = "vllm"
    """Inference engine of the replicas."""

    replicas: Count = Field(1, gt=0)
    """Number of replicas."""

    tensor_parallel: Count = Field(1, gt=0)
    """Devices of one replica."""

    n_gpus_per_node: Count = Field(8, gt=0)
    """Devices of one node; a replica with more spans nodes."""

    endpoints: tuple[str, ...] = ()
    """Base URLs (``http://host:port``) of OpenAI-compatible servers, for ``placement: external``."""

    start_seconds: Number = Field(1800.0, gt=0)
    """Longest time for all replicas to be ready."""

    @property
    def num_devices(self) -> int:
        """Devices taken from the cluster."""
        return self.replicas * self.tensor_parallel if self.placement == "standalone" else 0

    @model_validator(mode="after")
    def check_endpoints(self) -> GenRMSettings:
        if self.placement == "external" and not self.endpoints:
            raise ValueError("placement is 'external' but endpoints is empty; name the servers in endpoints")
        if self.placement != "external" and self.endpoints:
            raise ValueError(
                f"endpoints is {list(self.endpoints)} but placement is {self.placement!r}; set placement to 'external'"
            )
        for endpoint in self.endpoints:
            if not is_base_url(endpoint):
                raise ValueError(f"endpoints holds {endpoint!r}; write a base URL like http://host:8000, without /v1")
        return self


class RouterSettings(Settings):
    policy: Literal["measured_speed", "least_requests", "round_robin"] = "measured_speed"
    """Who is next: the replica with the fewest requests for its measured speed, never more than it works on at once;
    the one with the fewest requests; each in turn."""

    max_in_flight: Count | None = Field(None, gt=0)
    """Requests that a replica works on at once. Unset: its ``max_num_seqs`` in training; elsewhere it is learned from
    the engine's ``/metrics``."""

    hedge_budget: Number = Field(0.05, ge=0, le=1)
    """Tokens that second copies of overdue requests may cost, as a share of those answered; 0 for no such copies."""

    timeout_seconds: Number = Field(3600.0, gt=0)
    """Longest time for a request whose caller names none (``X-Request-Timeout``)."""

    probe_seconds: Number = Field(5.0, gt=0)
    """Time between two looks at a replica's ``/health``, and the longest wait for it."""

    max_waiting: Count = Field(20_000, gt=0)
    """Requests that wait for a replica; more get 503 and ``Retry-After``."""

    max_waiting_bytes: Count = Field(2**31, gt=0)
    """Bytes of all requests under way; beyond it likewise."""

    max_body_bytes: Count = Field(2**24, gt=0)
    """Bytes of one request; more get 413."""

    @model_validator(mode="after")
    def check_bytes(self) -> RouterSettings:
        if self.max_body_bytes > self.max_waiting_bytes:
            raise ValueError(
                f"max_body_bytes is {self.max_body_bytes} but max_waiting_bytes, of all requests together, is "
                f"{self.max_waiting_bytes}; raise that"
            )
        return self


class OverlongSettings(Settings):
    """DAPO's shaping of long responses (arXiv:2503.14476), added to every reward."""

    buffer: Count = Field(0, ge=0)
    """Tokens before ``data.max_response_length`` over which the reward falls; 0 for none of it."""

    factor: Number = Field(1.0, ge=0)
    """Reward units lost at the limit."""


class MemorySettings(Settings):
    """What was judged once is not judged again, in this run or after a resume."""

    max_entries: Count = Field(1_000_000, ge=0)
    """Judgements that are kept, the latest ones; 0 for none."""

    path: str | None = None
    """The file; unset, ``verdicts.sqlite`` in the run folder. Runs may share one."""

    checkpoint: str | None = None
    """Name of the judge's weights, where judgements of different ones must not be mixed up. Unset, it is made from the
    checkpoint's files, or of external servers from their name for it and their addresses."""


class FAPOSettings(Settings):
    penalty: Number = Field(1.0, ge=0, le=2)
    """Lambda: taken off the reward of a right answer with a flawed paragraph (arXiv:2510.22543). 0 only logs. Unset, it
    is made from ``rho_shift``, or else 1."""

    rho_shift: Number | None = Field(None, ge=0)
    """In place of ``penalty``: the ratio of fully correct to wrong rollouts at which flawed positives begin to be
    pushed out; lambda = 2 / (rho_shift + 1)."""

    run_dir: str = Field("fapo_run", min_length=1)
    """Folder that the run writes itself into; on a cluster, one that every node sees."""

    stall_seconds: Number = Field(7200.0, gt=0)
    """The run is stopped when no rollout is scored and no step ends for this long."""

    answer: AnswerSettings = AnswerSettings()
    overlong: OverlongSettings = OverlongSettings()
    judge: JudgeSettings = JudgeSettings()
    genrm: GenRMSettings = GenRMSettings()
    router: RouterSettings = RouterSettings()
    memory: MemorySettings = MemorySettings()

    @model_validator(mode="before")
    @classmethod
    def choose_penalty(cls, block: Any) -> Any:
        penalty, rho_shift = block.get("penalty"), block.get("rho_shift")
        if penalty is not None and rho_shift is not None:
            raise ValueError(f"penalty is {penalty} and rho_shift is {rho_shift}; set one of them, the other to null")
        if penalty is not None:
            return block
        is_number = isinstance(rho_shift, (int, float))  # the field says what is wrong with anything else
        return {**block, "penalty": penalty_from_rho_shift(rho_shift) if is_number else 1.0}

    @model_validator(mode="after")
    def check_judge(self) -> FAPOSettings:
        if self.genrm.placement == "none":
            if self.penalty:
                raise ValueError(
                    f"genrm.placement is 'none' but penalty is {self.penalty:g}: without a judge nothing is flawed; "
                    "set penalty to 0, or name a judge"
                )
        elif not self.judge.model:
            raise ValueError("judge.model is not set; name a GenRM checkpoint, e.g. fapo.judge.model=/models/genrm")
        return self


def read_settings(config: DictConfig) -> FAPOSettings:
    """Read and check the ``fapo:`` block.

    Raises:
        SettingsError: the first thing that is wrong, in one line with the key, the value and the way out.
    """
    block = OmegaConf.select(config, "fapo")
    if not isinstance(block, DictConfig):
        raise SettingsError(f"fapo is {block!r}, expected settings; add +recipe=fapo to the command")
    return parse_settings(OmegaConf.to_container(block, resolve=True))


def parse_settings(block: Mapping[str, Any]) -> FAPOSettings:
    """Like :func:`read_settings`, from plain values."""
    try:
        return FAPOSettings.model_validate(block)
    except ValidationError as exc:
        raise SettingsError(_explain(exc.errors()[0])) from exc


def router_settings(pairs: Iterable[str]) -> RouterSettings:
    """Settings of the router from ``key=value``, the values as Hydra reads them.

    Raises:
        SettingsError: the first thing that is wrong.
    """
    block = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SettingsError(f"{pair!r}: expected KEY=VALUE, such as policy=least_requests")
        try:
            block[key.removeprefix("fapo.router.")] = yaml.safe_load(value)
        except yaml.YAMLError as exc:
            raise SettingsError(f"fapo.router.{key}={value!r}: not a value in YAML") from exc
    try:
        return RouterSettings.model_validate(block)
    except ValidationError as exc:
        error = exc.errors()[0]
        raise SettingsError(_explain({**error, "loc": ("router", *error["loc"])})) from exc


def _explain(error: Mapping[str, Any]) -> str:
    path = [str(part) for part in error["loc"]]
    key = ".".join(["fapo", *path])
    if error["type"] == "extra_forbidden":
        group, _, name = key.rpartition(".")
        known = [other.rpartition(".")[2] for other in setting_names() if other.rpartition(".")[0] == group]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {group}.{close[0]}?" if close else f"{group} has {', '.join(known)}"
        return f"{key}={error['input']!r}: unknown setting; {hint}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}"
    return f"{key}={error['input']!r}: {error['msg']}"


def is_base_url(text: str) -> bool:
    """True of ``http://host:port``, perhaps with a path before ``/v1``."""
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not (parts.username or parts.password or parts.query or parts.fragment)
            and not parts.path.rstrip("/").endswith("/v1")
            and re.fullmatch(r"[!-~]+", text) is not None
        )
    except ValueError:
        return False


def setting_names(model: type[BaseModel] = FAPOSettings, prefix: str = "fapo") -> list[str]:
    """Dotted names of all settings, groups included."""
    names = []
    for name, field in model.model_fields.items():
        names.append(f"{prefix}.{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += setting_names(field.annotation, f"{prefix}.{name}")
    return names
