"""Tables of measurements and estimates of memory."""

from __future__ import annotations

from benchmarks.tables.form import Result, table


def sharded_memory(result: Result) -> str:
    """A line for each phase, with the largest rank."""
    bucket, lines = result["bucket_mb"], []
    for phase in dict.fromkeys(row["phase"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["phase"] == phase]
        share, peak = rows[0]["share_mb"], max(row["peak_mb"] for row in rows)
        own = ("", "") if share is None else (f"{share:,.1f}", f"{(peak - share) / bucket:.2f}")
        lines.append((phase, own[0], f"{rows[0]['peak_mb']:,.1f}", f"{peak:,.1f}", own[1]))
    facts = (
        f"{result['parameters']:,} parameters, {result['model_mb']:,.0f} MB in float32, on {result['ranks']} ranks, "
        f"{'with' if result['has_reference'] else 'without'} a reference policy; buckets of {bucket:g} MB. Publishing "
        f"blocked training for {result['publish_stall_s']:.2f} s, {result['publish_stall_share']:.2%} of a step of "
        f"{result['step_tokens']:,} tokens."
    )
    head = ("phase", "share, MB", "peak of rank 0, MB", "largest peak, MB", "over the share, buckets")
    return f"{facts}\n\n{table(head, lines)}"


def checkpoint_parts(result: Result) -> str:
    """A line for each way of writing a checkpoint with several ranks."""
    rows = [
        (row["way"], f"{row['blocked_s'] * 1000:,.0f} (at most {row['blocked_most_s'] * 1000:,.0f})",
         f"{row['write_s']:.2f}", f"{row['num_bytes'] / 1e6 / row['write_s']:,.0f}", f"{row['over_buckets']:.2f}")
        for row in result["rows"]
    ]  # fmt: skip
    facts = (
        f"{result['parameters']:,} parameters on {result['ranks']} ranks; {result['pairs']} checkpoints in each way; "
        f"buckets of {result['bucket_mb']:g} MB."
    )
    head = (
        "`trainer.checkpoint.parts`", "training blocked, ms", "until it is on disk, s", "MB/s",
        "held above the rank's share, buckets",
    )  # fmt: skip
    return f"{facts}\n\n{table(head, rows)}"


def logprob_memory(result: Result) -> str:
    """One line per case."""
    rows = [
        (f"{row['predictions']:,} x {row['vocabulary']:,}", str(row["chunk"] or "whole"), f"{row['peak_mb']:,.0f}",
         f"{row['logits_mb']:,.0f}", f"{row['seconds']:.2f}")
        for row in result["rows"]
    ]  # fmt: skip
    return table(("predictions x vocabulary", "chunk", "peak, MB", "one copy of the logits, MB", "s"), rows)


def memory(result: Result) -> str:
    """One line per case."""
    rows = [
        (row["case"], f"{row['parameters'] / 1e6:.2f}", f"{row['measured_bytes'] / 1e6:,.1f}",
         f"{row['predicted_bytes'] / 1e6:,.1f}", f"{row['difference']:+.1%}")
        for row in result["rows"]
    ]  # fmt: skip
    cases = table(("model", "parameters, M", "measured peak, MB", "predicted, MB", "difference"), rows)
    if "layouts" not in result:
        return cases
    proposed = [
        (row["model"].partition("/")[2], str(row["gpus"]), str(row["gpu_gb"]), f"{row['needed_bytes'] / 1e9:,.0f}",
         f"`{row['verdict']}`" if ":" in row["verdict"] else row["verdict"])
        for row in result["layouts"]
    ]  # fmt: skip
    head = ("model", "GPUs of the trainer", "GB each", "estimate, GB", "`validate`")
    return f"{cases}\n\n{table(head, proposed)}"
