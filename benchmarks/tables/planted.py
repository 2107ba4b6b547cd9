"""Tables of injected faults and findings: the probe's faults, the diagnosis of runs, faults of data."""

from __future__ import annotations

from benchmarks.tables.form import Result, table


def probe_faults(result: Result) -> str:
    """One line for each set-up: the injected fault and the causes that were named."""
    rows = [
        (row["set_up"], f"`{row['planted']}`" if row["planted"] else "nothing",
         ", ".join(f"`{kind}`" for kind in row["named"]) or "nothing", f"{row['cpu_s']:.1f}")
        for row in result["rows"]
    ]  # fmt: skip
    words = f"{result['prompts']} prompts x {result['samples']} samples."
    return f"{words}\n\n{table(('set-up', 'planted', 'named', 'processor time, s'), rows)}"


def diagnosis(result: Result) -> str:
    """Results by class of set-up, then one line for each set-up: the expected and the actual first finding."""
    kinds = ("right", "miss", "wrong cause", "false alarm", "not judged")
    summed = [(name, *(str(count.get(kind, 0)) for kind in kinds)) for name, count in result["counts"].items()]
    rows = [
        ("sick" if row["is_sick"] else "healthy", row["set_up"] + (" (unseen)" if row["is_unseen"] else ""),
         f"{row['steps']}", " or ".join(f"`{kind}`" for kind in row["expected"]), f"`{row['found']}`", row["result"])
        for row in result["rows"]
    ]  # fmt: skip
    head = ("", "set-up", "steps", "expected", "first finding", "result")
    return f"{table(('runs', *kinds), summed)}\n\n{table(head, rows)}"


def data_faults(result: Result) -> str:
    """One line for each kind of fault, then time and memory."""
    rows = [
        (f"`{one['kind']}`", f"{one['planted']}", f"{one['found']}", f"{one['removed']}", f"{one['recall']:.3f}",
         f"{one['precision']:.3f}", f"{one['unplanted']} ({one['unplanted_true']} true)",
         f"{one['precision_read']:.3f}")
        for one in result["kinds"]
    ]  # fmt: skip
    head = ("kind", "planted", "found", "removed", "recall", "precision", "unplanted", "precision after reading")
    measured = [{"rows": result["rows"], **result["run"]}, *([result["speed"]] if "speed" in result else [])]
    words = [
        f"{one['rows']:,} rows: {one['cpu_s']:.0f} s of processor time, {one['wall_s']:.0f} s; all processes together "
        f"{one['memory_mb_first_quarter']:,} MB in the first quarter of the time, {one['memory_mb_peak']:,} MB at most."
        for one in measured
    ]
    return "\n\n".join([table(head, rows), *words])
