"""Tables of measurements of long sequences and of experts."""

from __future__ import annotations

import statistics

from benchmarks.tables.form import Result, table


def long_sequences(result: Result) -> str:
    """One line per number of ranks."""
    single = result["rows"][0]
    rows = [
        (str(row["ranks"]), f"{row['peak_bytes'] / 1e6:,.0f}", f"{row['peak_bytes'] / single['peak_bytes']:.2f}",
         f"{row['largest_bytes'] / 1e6:,.1f}", f"{row['loss_difference']:.1e}", f"{row['gradient_difference']:.1e}",
         f"{row['seconds']:,.0f}")
        for row in result["rows"]
    ]  # fmt: skip
    head = (
        "ranks", "peak of a rank, MB", "of one process", "largest allocation, MB", "loss, difference",
        "gradient norm, relative difference", "s",
    )  # fmt: skip
    return table(head, rows)


def experts(result: Result) -> str:
    """One line per case."""
    rows = [
        (f"{row['hidden']} x {row['inner']}", f"{row['tokens']:,}", row["dtype"], f"{row['grouped_ms']:,.1f}",
         *(f"{statistics.median(row[key]):.2f}x ({min(row[key]):.2f} to {max(row[key]):.2f})"
           for key in ("loop_ratio", "transformers_ratio")),
         f"{row['difference']:.1e}")
        for row in result["rows"]
    ]  # fmt: skip
    head = (
        "hidden x inner", "tokens", "dtype", "grouped, ms", "loop / grouped", "transformers' grouped_mm / grouped",
        "difference from the loop",
    )  # fmt: skip
    return table(head, rows)
