"""Tables of the comparison of objectives by lag."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.spreads import mean_interval
from benchmarks.tables.form import Result, table


def objectives(result: Result) -> str:
    """For each part a line for each variant, a column for each lag."""
    kinds = {"gradients": _gradients, "curves": _curves, "quickstart": _quickstart}
    return "\n\n".join(
        f"{kinds[name.partition(',')[0]](name, part)}\n\n<small>`{part['command']}`, {part['date']}.</small>"
        for name, part in result["parts"].items()
    )


def _quickstart(name: str, part: Result) -> str:
    rows = [
        (f"`{row['job']}`, seed {row['seed']}", ", ".join(f"{step}: {value:.3f}" for step, value in row["curve"]),
         row["audit"])
        for row in part["rows"]
    ]  # fmt: skip
    if (num_seeds := len(part["seeds"])) > 1:
        rows += [
            (f"`{job}`, {num_seeds} seeds", f"before: {_cell(ends['before'])}, after: {_cell(ends['after'])}", "")
            for job, ends in part["summary"].items()
        ]
    return f"**{name}**, greedy accuracy on held-out prompts\n\n{table(('job', 'step: accuracy', 'audit'), rows)}"


def _gradients(name: str, part: Result) -> str:
    lags = [str(lag) for lag in part["lags"]]
    rows = [
        (f"`{variant}`", *(_cell(by_lag[lag]["single"]) for lag in lags),
         *(_plain(by_lag[lag]["mean"]) for lag in lags[-2:]), *(_plain(by_lag[lag]["norm"]) for lag in lags[-2:]))
        for variant, by_lag in part["summary"].items()
    ]  # fmt: skip
    head = (
        "cosine with the on-policy gradient", *(f"lag {lag}" for lag in lags),
        *(f"mean gradient, lag {lag}" for lag in lags[-2:]), *(f"norm ratio, lag {lag}" for lag in lags[-2:]),
    )  # fmt: skip
    return f"**{name}**, {len(part['seeds'])} seeds, 95 % intervals over seeds and versions\n\n{table(head, rows)}"


def _curves(name: str, part: Result) -> str:
    lags = [str(lag) for lag in part["lags"]]
    rows = [
        (f"`{variant}`", _rates(part, variant), *(_cell(by_lag[lag]) for lag in lags),
         *(_cell(_change(part, variant, lag)) for lag in part["lags"][1:]))
        for variant, by_lag in part["summary"].items()
    ]  # fmt: skip
    head = (
        f"accuracy after {part['steps']} steps", "learning rate", *(f"lag {lag}" for lag in lags),
        *(f"lag {lag} minus lag {lags[0]}" for lag in lags[1:]),
    )  # fmt: skip
    note = f"{len(part['seeds'])} seeds, 95 % intervals over seeds, differences paired by seed"
    return f"**{name}**, {note}\n\n{table(head, rows)}"


def _rates(part: Result, variant: str) -> str:
    """The rate that was chosen, and the accuracy of each rate on the seed of the tuning."""
    tried = part["tried"].get(variant, {})
    of = "; ".join(f"{rate}: {value:.2f}" for rate, value in tried.items())
    return f"{part['tuned'][variant]} ({of})" if of else part["tuned"][variant]


def _change(part: Result, variant: str, lag: int) -> Sequence[float | None]:
    """How much the accuracy differs from that at the smallest lag: mean over the seeds, and half width."""
    reached = {(row["lag"], row["seed"]): row["accuracy"] for row in part["rows"] if row["variant"] == variant}
    return mean_interval([reached[lag, seed] - reached[part["lags"][0], seed] for seed in part["seeds"]])


def _cell(pair: Sequence[float | None]) -> str:
    mean, half = pair
    if mean is None:
        return "-"
    return f"{mean:.3f}" if half is None else f"{mean:.3f} ± {half:.3f}"


def _plain(pair: Sequence[float | None]) -> str:
    return "-" if pair[0] is None else f"{pair[0]:.2f}"
