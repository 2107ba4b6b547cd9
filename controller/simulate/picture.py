"""Draws a sweep: throughput and waits over the varied keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_like.errors import UserError
from controller.simulate.plan import Trial

WIDTH_IN, HEIGHT_IN = 9.0, 4.2


def draw(trials: Sequence[Trial], path: Path) -> None:
    """Write the picture (.png, .svg or .pdf by its name): the first varied key along x, the others as lines.

    Raises UserError if it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = list(trials[0].varied)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    lines: dict[str, list[Trial]] = {}
    for trial in trials:
        lines.setdefault(", ".join(f"{key}={trial.varied[key]}" for key in keys[1:]), []).append(trial)
    for number, (name, members) in enumerate(lines.items()):
        xs = [trial.varied[keys[0]] if keys else "the job" for trial in members]
        left.plot(xs, [trial.outcome.samples_per_s for trial in members], "o-", label=name or None)
        colour = f"C{number}"
        waits = [100 * trial.outcome.trainer_wait_share for trial in members]
        idle = [100 * trial.outcome.rollout_idle_share for trial in members]
        right.plot(xs, waits, "o-", color=colour, label=f"{name} trainer waits".strip())
        right.plot(xs, idle, "s--", color=colour, label=f"{name} rollout idle".strip())
    for axes, title, unit in ((left, "Throughput", "samples/s"), (right, "Idle time", "% of the time")):
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xlabel(keys[0] if keys else "")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    right.legend(fontsize="small")
    if len(lines) > 1:
        left.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the plot cannot be written ({error})",
            where=str(path),
            remedy="choose a file in a writable folder, such as --plot plan.png",
        ) from error
    finally:
        pyplot.close(figure)
