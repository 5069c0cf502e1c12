"""A run folder as a table on the screen."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_fapo.run_folder import RunFolder, is_trained

EVERY_COLUMNS = {"mean reward": "critic/score/mean", "tokens": "response_length/mean", "seconds": "timing_s/step"}
STEP_COLUMNS = {
    "accuracy": "fapo/accuracy",
    "judged": "fapo/judged",
    "flawed": "fapo/flawed",
    "unknown": "fapo/unknown",
    **EVERY_COLUMNS,
}
JUDGE_COLUMNS = {
    "accuracy": "fapo_genrm/accuracy",
    "F1": "fapo_genrm/f1",
    "clean flagged": "fapo_genrm/clean_flagged_rate",
    "invalid": "fapo_genrm/invalid_rate",
    **EVERY_COLUMNS,
}
"""Where a judge is trained."""


def report_run(root: Path, *, finish: bool = False) -> None:
    """Print the report of a run, also of one that is under way.

    Args:
        finish: first merge the parts of a run that was killed, and write its summary.

    Raises:
        DataError: ``root`` is no run folder.
    """
    run = RunFolder.of_a_run(root)
    if finish and run.summary is None:
        with run.locked():
            run.finish(status="killed", ended_at=run.last_change())
    with run.damage_named():
        print_report(run, Console())


def print_report(run: RunFolder, console: Console) -> None:
    """The steps, and the counts of the whole run."""
    lines = [line for line in run.metrics() if is_trained(line)]
    columns = JUDGE_COLUMNS if any(JUDGE_COLUMNS["accuracy"] in line for line in lines) else STEP_COLUMNS
    steps = Table(title="steps")
    for name in ("step", *columns):
        steps.add_column(name, justify="right")
    for line in lines:
        steps.add_row(str(line["step"]), *(_cell(line.get(key)) for key in columns.values()))
    console.print(steps)
    summary = Table(title="run", show_header=False)
    summary.add_column()
    summary.add_column(justify="right")
    for key, value in (run.summary or run.summarise(status="not finished", ended_at=run.last_change())).items():
        summary.add_row(key.replace("_", " "), _cell(value))
    console.print(summary)
    console.print(f"run folder: {run.root}", highlight=False, markup=False)


def _cell(value: object) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else escape(str(value))
