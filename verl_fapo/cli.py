"""The command ``verl-fapo``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TextIO

import click

from verl_fapo import __version__
from verl_fapo.errors import DataError, RunError, UsageError

PROMPT_KEYS = ("problem", "ground_truth", "solution")


class _Command(click.Group):
    def invoke(self, context: click.Context) -> object:
        try:
            return super().invoke(context)
        except (UsageError, RunError) as exc:
            click.echo(f"verl-fapo: {exc}", err=True)
            context.exit(2 if isinstance(exc, UsageError) else 1)
        except BrokenPipeError:
            raise  # click ends in silence, as its reader has
        except OSError as exc:
            click.echo(f"verl-fapo: {exc}", err=True)
            context.exit(2)


@click.group(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Flawed-Aware Policy Optimization for veRL.

    Training itself is veRL's command with one more flag: python -m verl.trainer.main_ppo +recipe=fapo ...
    """


@main.command()
@click.option(
    "--profile",
    type=click.Choice(["tiny", "judge", "smollm2"]),
    help="tiny: a small world, whose policy learns. judge: the same world, whose judge learns. smollm2: SmolLM2-135M.  "
    "[default: tiny; smollm2 with --model or --data]",
)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of models and problems.")
@click.option("--model", type=click.Path(path_type=Path), help="Model folder of the policy.  [default: the profile's]")
@click.option(
    "--judge",
    type=click.Path(path_type=Path),
    help="Model folder of the judge.  [default: as --model, or the profile's]",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Parquet file of problems, validation included.  [default: the profile's]",
)
@click.option("--steps", type=click.IntRange(min=1), help="Training steps.  [default: 15; smollm2: 2]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("fapo_demo"),
    show_default=True,
    help="Folder for the run, its log and its data.",
)
@click.argument("overrides", nargs=-1)
def demo(profile: str | None, **options: object) -> None:
    """Train with FAPO on this machine's CPU, and show what came out.

    OVERRIDES are veRL settings, such as fapo.penalty=0 for the baseline, or data.max_response_length=512
    fapo.judge.max_tokens=1024 for a model of your own.
    """
    from verl_fapo.demo.run import DemoOptions, run_demo

    own = options["model"] or options["data"]
    sys.exit(run_demo(DemoOptions(profile=profile or ("smollm2" if own else "tiny"), **options)))


@main.command()
@click.argument("source", type=click.Choice(["gsm8k", "fapo_critic"]))
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--split", default="train", show_default=True, help="Name of the split, kept in extra_info.split.")
@click.option("--limit", type=click.IntRange(min=1), help="Take the first rows only.")
def prepare(source: str, file: Path, out: Path, split: str, limit: int | None) -> None:
    """Write the problems of FILE, in SOURCE's own form, as the parquet file OUT that veRL reads."""
    from verl_fapo.data import SOURCES, write_parquet

    num = write_parquet(SOURCES[source](file, split=split, limit=limit), out)
    click.echo(f"{out}: {num} rows")


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--finish", is_flag=True, help="First merge the parts of a run that was killed.")
def report(run: Path, finish: bool) -> None:
    """Show the run in folder RUN, also one that is under way."""
    from verl_fapo.report import report_run

    report_run(run, finish=finish)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("rollout", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead, or one a line without ROLLOUT.")
def explain(run: Path, rollout: str | None, as_json: bool) -> None:
    """Show how a rollout of the run in folder RUN came to its reward.

    That is the problem, the answer check, the critique with the wrong paragraph marked, the verdict, the reward and the
    advantage. ROLLOUT is an id of the run folder, or its beginning, as in 3f2a_1. Without it the latest rollouts of
    each kind are listed.
    """
    from verl_fapo import explain as explaining

    lines = explaining.explain(run, rollout, as_json=as_json) if rollout else explaining.telling(run, as_json=as_json)
    click.echo("\n".join(lines))


@main.command()
@click.argument("file", type=click.File(encoding="utf-8"))
@click.option(
    "--scope",
    type=click.Choice(["whole", "after_think"]),
    default="whole",
    show_default=True,
    help="What of a solution was judged, like fapo.judge.scope.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a row instead.")
@click.option(
    "--prompt", "template", metavar="TEMPLATE", help="Print the prompts instead: paragraphs, raw, or a template file."
)
def verdict(file: TextIO, scope: str, as_json: bool, template: str | None) -> None:
    """Show what the parser makes of the critiques in FILE, such as a run's critiques.jsonl; - is standard input.

    FILE holds a JSON object, a list of them, or one a line, with the texts solution and critique (or a list critiques).
    """
    from verl_fapo import critique_view as view
    from verl_fapo.critique import split_paragraphs
    from verl_fapo.templates import read_template

    prompts = read_template(template) if template is not None else None
    try:
        text = file.read()
    except UnicodeDecodeError as exc:
        raise DataError(f"{file.name}: no text in UTF-8 ({exc})") from exc
    for number, row in view.read_rows(text, where=file.name):
        try:
            if prompts:
                problem, reference, solution = (view.row_text(row, key) for key in PROMPT_KEYS)
                prompt = prompts.render(problem, reference, split_paragraphs(solution, scope=scope))
                click.echo(json.dumps({"row": number, "prompt": prompt}) if as_json else view.harmless(prompt))
                continue
            reading = view.read_row(row, scope=scope)
        except DataError as exc:
            raise DataError(f"{file.name}: row {number}: {exc}") from exc
        click.echo(view.as_json(number, reading) if as_json else "\n".join(view.show(number, reading)))


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def template(file: Path, out: Path) -> None:
    """Write the judge's template that the prompts of FILE were made from to OUT, for fapo.judge.template.

    FILE is in the form of FAPO-Critic, JSON lines or parquet. Every one of its prompts is made again from the template
    and must be the same, byte for byte.
    """
    from verl_fapo.critique_view import template_of

    found, num_rows, num_escaped = template_of(file)
    out.write_bytes(f"{found.text}\n".encode())
    click.echo(f"{out}: all {num_rows} prompts are made again from it, byte for byte")
    if num_escaped:
        click.echo(f"in {num_escaped} of them, lines that imitate the prompt would be escaped now")


@main.command()
def warm() -> None:
    """Keep a fork server for CPU runs ready until Ctrl-C: they start faster, and need not start one themselves.

    It prints the line that tells a shell of it.
    """
    from verl_fapo.cpu.fork_server import ADDRESS_VARIABLE, ForkServer, recipe_environment

    server = ForkServer(recipe_environment())
    try:
        server.wait_until_ready()
        click.echo(f"export {ADDRESS_VARIABLE}={server.address}")
        server.wait()
    except KeyboardInterrupt:
        server.close()


@main.command()
@click.option("--port", type=click.IntRange(0, 65535), required=True, help="Port to listen on; 0 for a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; :: for all.")
@click.option("--worker", "workers", multiple=True, metavar="URL", help="Base URL of a replica, without /v1.")
@click.option(
    "--api-key", envvar="FAPO_API_KEY", default="", help="Callers must show it as a bearer token.  [env: FAPO_API_KEY]"
)
@click.option("--grace", type=click.FloatRange(min=0), default=600, show_default=True, help="Seconds to end in.")
@click.option(
    "--time-scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    help="Factor on all of the router's own times, for simulations.",
)
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of fapo.router, such as policy=least_requests or max_in_flight=64; may be repeated.",
)
@click.argument("more_workers", nargs=-1, metavar="[URL]...")
def route(
    workers: tuple[str, ...],
    more_workers: tuple[str, ...],
    pairs: tuple[str, ...],
    host: str,
    port: int,
    api_key: str,
    grace: float,
    time_scale: float,
) -> None:
    """Give many replicas of a model one address: a router that loses no request while one of them can answer.

    Any path and method goes to the replicas, except the router's own GET /health, /ready, /metrics and /replicas.
    Replicas come and go with POST /replicas {"url": URL}, POST /replicas/drain and DELETE /replicas?url=URL.
    """
    from verl_fapo.errors import RouterError
    from verl_fapo.router.serve import serve
    from verl_fapo.settings import is_base_url, router_settings

    urls = tuple(url.rstrip("/") for url in (*workers, *more_workers))
    for url in urls:
        if not is_base_url(url):
            raise RouterError(f"--worker {url!r}: expected a base URL like http://host:8000, without /v1")
    serve(
        router_settings(pairs),
        urls,
        host=host,
        port=port,
        api_key=api_key,
        grace_seconds=grace,
        time_scale=time_scale,
    )


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of {section, status, what, way_out} instead.")
@click.option("--recipe", "recipes", multiple=True, help="A recipe of the command, such as fapo or device/cpu.")
@click.option("--overrides", "more", multiple=True, help="One argument of the command, like OVERRIDES.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=120,
    show_default=True,
    help="Longest time for one part of the examination.",
)
@click.argument("overrides", nargs=-1)
def doctor(
    as_json: bool, recipes: tuple[str, ...], more: tuple[str, ...], seconds: float, overrides: tuple[str, ...]
) -> None:
    """Look for what would keep FAPO from training here: packages, plugin, machine, Ray.

    OVERRIDES are the arguments of the command python -m verl.trainer.main_ppo; with them, or with --recipe, its
    settings, models and data are examined too. Nothing is started or written. The exit code is 1 if there is a
    problem.
    """
    from verl_fapo.doctor.examination import examine_all, show, show_json

    if sys.stderr.isatty():
        click.echo("this takes about a minute", err=True)
    arguments = [*map(recipe_override, recipes), *more, *overrides]
    findings = examine_all(arguments, seconds=seconds)
    (show_json if as_json else show)(findings)
    sys.exit(any(finding.status == "problem" for finding in findings))


def recipe_override(recipe: str) -> str:
    """``fapo`` as ``+recipe=fapo``; ``device/cpu`` or ``device=cpu`` as ``+recipe/device=cpu``."""
    group, _, name = recipe.replace("=", "/").rpartition("/")
    return f"+recipe/{group}={name}" if group else f"+recipe={name}"


if __name__ == "__main__":
    main()
