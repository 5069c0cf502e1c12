"""Runs the parts of the examination, and shows what they found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import click

from verl_fapo.doctor.findings import MAX_REASON, Composed, Finding

SECTIONS = ("packages", "imports", "plugin", "machine", "ray", "settings", "policy", "judge", "data", "run folder")
COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
REINSTALL = "pip install --force-reinstall {0}, in the versions that 'packages' above names"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Something that is examined in a process of its own."""

    section: str
    module: str
    """In this package; its function ``examine`` yields the findings."""

    subject: str
    """What is said to have crashed or hung, if it does."""

    way_out: str
    arguments: dict[str, Any] = field(default_factory=dict)


INSTALLATION = (
    Part(
        section="packages",
        module="packages",
        subject="reading the installed packages",
        way_out="pip install --force-reinstall --no-deps verl-fapo packaging",
    ),
    *(
        Part(
            section="imports",
            module="imports",
            subject=f"import {package}",
            way_out=REINSTALL.format(package),
            arguments={"package": package},
        )
        for package in ("torch", "transformers", "math-verify", "engine")
    ),
    Part(
        section="plugin",
        module="plugin",
        subject="import verl, with verl_fapo in it",
        way_out="see 'imports' above; else pip install --force-reinstall --no-deps verl-fapo",
    ),
    Part(
        section="machine",
        module="machine",
        subject="looking at the machine",
        way_out="pip install --force-reinstall psutil",
    ),
)


def examine_all(overrides: Sequence[str], *, seconds: float) -> list[Finding]:
    """Examine the installation and, where there are ``overrides``, the command with these arguments.

    Args:
        seconds: longest time for one part; what does not end in time is killed, and a problem.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parts = [*INSTALLATION, command_part(overrides) if overrides else ray_part("")]
    findings, composed = run_parts(parts, seconds=seconds)
    if composed:
        parts = [ray_part(composed.config_yaml), *model_parts(composed.config_yaml)]
        findings += run_parts(parts, seconds=seconds, environment=composed.environment)[0]
    elif overrides:
        findings += run_parts([ray_part("")], seconds=seconds)[0]
    return sorted(dict.fromkeys(findings), key=lambda finding: SECTIONS.index(finding.section))


def run_parts(
    parts: Sequence[Part], *, seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[list[Finding], Composed | None]:
    """Run some parts, as many at once as there are cores for.

    Args:
        environment: variables that they get besides those of this process.
    """
    return asyncio.run(_run_parts(parts, seconds, environment or {}))


async def _run_parts(
    parts: Sequence[Part], seconds: float, environment: Mapping[str, str]
) -> tuple[list[Finding], Composed | None]:
    # More at once would wait for memory and disk.
    turns = asyncio.Semaphore(max(2, min(4, len(os.sched_getaffinity(0)))))

    async def run(part: Part) -> list[Finding | Composed]:
        async with turns:
            return await _run_part(part, seconds, environment)

    told = [item for items in await asyncio.gather(*map(run, parts)) for item in items]
    composed = next((item for item in told if isinstance(item, Composed)), None)
    return [item for item in told if isinstance(item, Finding)], composed


async def _run_part(part: Part, seconds: float, environment: Mapping[str, str]) -> list[Finding | Composed]:
    # Files in memory: the disk may be full, and a pipe would wait for whoever still holds its other end.
    with _memory_file() as request, _memory_file() as said, _memory_file() as errors:
        request.write(json.dumps({"module": part.module, "arguments": part.arguments}).encode())
        request.seek(0)
        code = await _run_process(request, said, errors, seconds, environment)
        told = _read(said)
        if code != 0:
            how = f"did not end within {seconds:g} s" if code is None else _end(code)
            last = _last_line(errors)
            what = f"{part.subject} {how}: {last}" if last else f"{part.subject} {how}"
            told.append(Finding(part.section, "problem", what, part.way_out))
    return told


async def _run_process(
    request: IO[bytes], said: IO[bytes], errors: IO[bytes], seconds: float, environment: Mapping[str, str]
) -> int | None:
    """The exit code; None if the time was up. Nothing of the process stays behind."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "verl_fapo.doctor.part", str(seconds)),
        stdin=request,
        stdout=said,
        stderr=errors,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", **environment},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _end(code: int) -> str:
    return f"died by {signal.Signals(-code).name}" if code < 0 else "failed"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:MAX_REASON]


def _read(said: IO[bytes]) -> list[Finding | Composed]:
    said.seek(0)
    told: list[Finding | Composed] = []
    for line in said.read().decode(errors="replace").splitlines():
        # A line may be cut off by a crash.
        with contextlib.suppress(ValueError):
            ((kind, values),) = json.loads(line).items()
            told.append({"Finding": Finding, "Composed": Composed}[kind](**values))
    return told


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("verl-fapo-doctor"), "w+b")


def command_part(overrides: Sequence[str]) -> Part:
    """Composes the config of the command with these arguments, and checks its settings."""
    return Part(
        section="settings",
        module="command",
        subject="composing the config",
        way_out="mend what 'imports' and 'plugin' above name",
        arguments={"overrides": list(overrides)},
    )


def ray_part(config_yaml: str) -> Part:
    """Joins the cluster that the command would join."""
    return Part(
        section="ray",
        module="cluster",
        subject="asking Ray",
        way_out="look at the cluster with: ray status; for a Ray of the command's own unset RAY_ADDRESS",
        arguments={"config_yaml": config_yaml},
    )


def model_parts(config_yaml: str) -> list[Part]:
    """The parts that look at the files that the command names."""
    rows = (
        # section, module, the rest of its arguments, way out
        ("policy", "checkpoints", {"role": "policy"}, "copy the checkpoint of actor_rollout_ref.model.path again"),
        ("judge", "checkpoints", {"role": "judge"}, "copy the checkpoint of fapo.judge.model again"),
        ("data", "data", {}, "write the files of data.train_files and data.val_files again"),
        ("run folder", "run_folder", {}, "name another folder in fapo.run_dir"),
    )
    return [
        Part(
            section=section,
            module=module,
            subject=f"reading the {section}",
            way_out=way_out,
            arguments={"config_yaml": config_yaml, **more},
        )
        for section, module, more, way_out in rows
    ]


def show(findings: Sequence[Finding]) -> None:
    """Print a line a finding under the headings of their sections, and the way out below each that has one."""
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            click.secho(section, bold=True)
        click.echo(f"  {click.style(f'{finding.status:<8}', fg=COLOURS[finding.status])} {finding.what}")
        if finding.way_out:
            click.echo(f"           -> {finding.way_out}")
    problems = sum(finding.status == "problem" for finding in findings)
    click.echo(f"{problems} problem{'s' * (problems != 1)}" if problems else "no problem found")


def show_json(findings: Sequence[Finding]) -> None:
    """Print the findings as a JSON list of objects."""
    click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
