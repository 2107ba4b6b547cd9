"""Formats the suite's rows as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_suite.case import Row

COLUMNS: dict[str, dict[str, str]] = {
    "environment": {},  # all values of a row, see `_facts`
    "limits": {"case": "limit", "value": "measured"},
    "attention_errors": {
        "case": "error against float32", "of": "of", "output_error": "output", "output_error_limit": "limit",
        "gradient_error": "gradient", "gradient_error_limit": "limit",
    },
    "attention_times": {
        "case": "one layer, both passes", "sequences": "sequences", "tokens": "tokens", "ms": "ms",
        "tflop_per_s": "TFLOP/s",
    },
    "engine": {
        "case": "engine", "tokens_per_s": "tokens/s", "step_ms": "step ms", "step_p95_ms": "p95 ms",
        "limit_ms": "limit ms", "bandwidth_share": "of bandwidth", "prefill_tokens_per_s": "prefill tokens/s",
        "prefill_matmul_share": "of matmul peak",
    },
    "training": {
        "case": "training", "kernel": "kernel", "tokens": "tokens", "micro_batches": "micro-batches",
        "budget": "of at most", "tokens_per_s": "tokens/s", "mfu": "MFU", "pass_ms": "passes ms",
        "update_ms": "update ms", "pack_ms": "packing ms", "peak_gib": "peak GiB",
    },
    "logprobs": {
        "case": "log-probs", "ms": "ms", "peak_gib": "peak GiB", "one_copy_of_logits_gib": "logits once GiB",
        "difference_nats": "difference nat",
    },
    "swap": {
        "case": "swap, by kind of file", "mb": "MB", "publish_s": "publish s", "publish_gb_per_s": "GB/s",
        "stage_s": "stage s", "stage_gb_per_s": "GB/s", "pause_ms": "pause ms", "gap_ms": "gap ms",
        "tokens_per_s": "tokens/s before", "staging_share": "while staging",
    },
    "modes": {
        "case": "two processes on one GPU", "samples_per_s": "samples/s", "over_sync": "over sync",
        "tokens_per_s": "tokens/s", "trainer_wait_share": "trainer waits", "rollout_idle_share": "rollout idle",
        "staleness_max": "max staleness", "steps": "steps", "wall_s": "total s",
    },
    "quickstart": {
        "case": "quickstart", "accuracy_before": "before", "accuracy_after": "after", "steps": "steps",
        "samples_per_s": "samples/s", "trainer_wait_share": "trainer waits", "rollout_idle_share": "rollout idle",
        "staleness_mean": "staleness", "staleness_max": "max", "audit": "audit", "train_wall_s": "training s",
        "wall_s": "whole s",
    },
}  # fmt: skip
SHARES = ("bandwidth_share", "prefill_matmul_share", "mfu", "staging_share", "trainer_wait_share", "rollout_idle_share")


def render(rows: Sequence[Row]) -> str:
    """All tables of one part, in the order of their first rows; cases without figures are listed below."""
    blocks = []
    for table in dict.fromkeys(row["table"] for row in rows):
        members = [row for row in rows if row["table"] == table]
        if table == "environment":
            blocks.append("\n".join(_facts(row) for row in members))
            continue
        measured = [row for row in members if any(key in row for key in list(COLUMNS[table])[1:])]
        if measured:
            blocks.append(_aligned(table, measured))
        notes = [_note(row) for row in members if row["status"] != "ok"]
        if notes:
            blocks.append("\n".join(notes))
    return "\n\n".join(blocks)


def _facts(row: Row) -> str:
    if row["status"] != "ok":
        return _note(row)
    rest = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("table", "case", "status", "value"))
    return f"{row['case']}: {row['value']}" + (f" ({rest})" if rest else "")


def _note(row: Row) -> str:
    return f"  {row['case']}: {row['status']}, {row.get('reason', 'no reason given')}"


def _aligned(table: str, rows: Sequence[Row]) -> str:
    columns = {
        key: heading
        for key, heading in COLUMNS[table].items()
        if key == "case" or any(row.get(key) is not None for row in rows)
    }
    lines = [list(columns.values()), *([cell(key, row.get(key)) for key in columns] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(text.ljust(width) if index == 0 else text.rjust(width) for index, (text, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ).rstrip()


def cell(key: str, value: Any) -> str:
    """Text of a value in the column `key`."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if key in SHARES:
        return f"{100 * value:.1f} %"
    if "error" in key or "nats" in key:
        return f"{value:.1e}"
    if isinstance(value, int) or abs(value) >= 1e5:
        return scaled(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def scaled(value: float) -> str:
    """Text of a number, with a letter for the power of ten if it is large."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:,.2f} {letter}"
    return f"{value:,.0f}"
