"""Runs a user's config at several values of one of its keys: `benchmarks.staleness CONFIG --sweep KEY=A,B`.

The command line is in staleness.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measured import Measured
from benchmarks.spreads import spread_of
from benchmarks.tables.form import SHOWN, spread_cell

KEYS = ("accuracy_before", "accuracy_after", "samples_per_s", "tokens_per_s", "train_wall_s", "trainer_wait_share",
        "rollout_idle_share", "staleness_mean", "staleness_max", "steps", "groups_dropped", "audit")  # fmt: skip
"""Entries of a job's summary that are stored."""
Row = dict[str, Any]


def sweep(
    config: str, text: str, seeds: Sequence[int], overrides: Sequence[str], runs_dir: Path, measured: Measured
) -> list[Row]:
    """Run a user's config at several values of one key."""
    key, _, values = text.partition("=")
    if not key or not values:
        raise SystemExit(f"--sweep {text}: write KEY=A,B, such as staleness.max_staleness=0,2,8")
    rows = []
    for seed in seeds:
        for value in values.split(","):
            settings = [f"seed={seed}", *overrides, f"{key}={value}"]
            summary = measured.job(config, settings, runs_dir)
            rows.append(
                {"key": key, "value": value, "seed": seed, **{name: summary[name] for name in (*KEYS, "measured")}}
            )
            print(f"seed {seed}  {key}={value}  "
                  + "  ".join(f"{name} {summary[name]}" for name in SHOWN[:2]), flush=True)  # fmt: skip
    return rows


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One line per value: mean, lowest and highest over the seeds; null if a run measured nothing."""
    lines = []
    for value in dict.fromkeys(row["value"] for row in rows):
        own = [row for row in rows if row["value"] == value]
        found = {name: [row[name] for row in own] for name in SHOWN}
        spreads = {name: None if None in values else spread_of(values) for name, values in found.items()}
        lines.append({"key": own[0]["key"], "value": value, **spreads})
    return lines


def print_sweep(lines: Sequence[Row]) -> None:
    """Print the lines, with the lowest and the highest in brackets."""
    print(f"\n{lines[0]['key']:28}" + "".join(f"{name:>28}" for name in SHOWN))
    for line in lines:
        print(f"{line['value']:28}" + "".join(f"{spread_cell(line, name):>28}" for name in SHOWN))
