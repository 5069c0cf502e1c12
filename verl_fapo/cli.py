"""The command ``verl-fapo``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from verl_fapo import __version__
from verl_fapo.errors import RunError, UsageError


class _Command(click.Group):
    def invoke(self, context: click.Context) -> object:
        try:
            return super().invoke(context)
        except (UsageError, RunError) as exc:
            click.echo(f"verl-fapo: {exc}", err=True)
            context.exit(2 if isinstance(exc, UsageError) else 1)
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
@click.option("--model", type=click.Path(path_type=Path), help="Model folder of policy and judge.  [default: SmolLM2]")
@click.option("--judge", type=click.Path(path_type=Path), help="Model folder of the judge.  [default: as --model]")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Parquet file of problems, validation included.  [default: word problems]",
)
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True, help="Training steps.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("fapo_demo"),
    show_default=True,
    help="Folder for the run, its log and its data.",
)
@click.argument("overrides", nargs=-1)
def demo(**options: object) -> None:
    """Train with FAPO on this machine's CPU, and show what came out.

    OVERRIDES are veRL settings, such as actor_rollout_ref.rollout.n=8 or fapo.penalty=0.5. The sizes are a toy's: a
    model of your own may want data.max_response_length=512 fapo.judge.max_tokens=1024.
    """
    from verl_fapo.demo import DemoOptions, run_demo

    sys.exit(run_demo(DemoOptions(**options)))


@main.command()
@click.argument("source", type=click.Choice(["gsm8k"]))
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--split", default="train", show_default=True, help="Name of the split, kept in extra_info.split.")
@click.option("--limit", type=click.IntRange(min=1), help="Take the first rows only.")
def prepare(source: str, file: Path, out: Path, split: str, limit: int | None) -> None:
    """Write the problems of FILE, in SOURCE's own form, as the parquet file OUT that veRL reads."""
    from verl_fapo.data import SOURCES, write_parquet

    num = write_parquet(SOURCES[source](file, split=split, limit=limit), out)
    click.echo(f"{out}: {num} problems")


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--finish", is_flag=True, help="First merge the parts of a run that was killed.")
def report(run: Path, finish: bool) -> None:
    """Show the run in folder RUN, also one that is under way."""
    from verl_fapo.report import report_run

    report_run(run, finish=finish)
