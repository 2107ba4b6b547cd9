"""Tables of measurements of long sequences."""

from __future__ import annotations

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
