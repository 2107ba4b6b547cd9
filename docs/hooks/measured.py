"""Build hook: `<!-- measured: NAME -->` becomes the table of benchmarks/results/NAME.json, with command and machine.

Owns: the tables. Refuses: numbers of its own: without a result file the page says so, and how to make one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

_PLACE = re.compile(r"^<!-- measured: (?P<name>\w+) -->$", re.MULTILINE)
Result = dict[str, Any]


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Fill in every place of a page."""
    root = Path(config.docs_dir).parent

    def filled(match: re.Match[str]) -> str:
        return section(root, match["name"], to_root="../" * page.file.src_uri.count("/"))

    return _PLACE.sub(filled, markdown)


def section(root: Path, name: str, *, to_root: str = "") -> str:
    """The Markdown for one benchmark."""
    source = root / "benchmarks" / "results" / f"{name}.json"
    if not source.is_file():
        return (
            f'!!! note "Not measured yet"\n    `benchmarks/results/{name}.json` is not there. '
            f"`python -m benchmarks.{name}` makes it; this page shows it from then on."
        )
    result = json.loads(source.read_text())
    picture = root / "docs" / "pictures" / f"{name}.svg"
    drawn = f"![{name}: the measured values, as in the table below]({to_root}pictures/{name}.svg)\n\n"
    return (drawn if picture.is_file() else "") + markdown(name, result)


def markdown(name: str, result: Result) -> str:
    """A result as Markdown: its table, and below it what made it."""
    return "\n\n".join([*([TABLES[name](result)] if name in TABLES else []), _stamp(result)])


def _stamp(result: Result) -> str:
    machine = result.get("machine", {})
    where = [str(machine[key]) for key in ("gpu", "cpu") if machine.get(key)]
    where += [f"{machine['cores']} cores"] if machine.get("cores") else []
    where += [f"{key} {machine[key]}" for key in ("python", "torch", "transformers") if machine.get(key)]
    made = f"Made by `{result['command'].strip()}`" + (f" on {result['date']}" if "date" in result else "")
    return f"<small>{made}: {', '.join(where)}.</small>" if where else f"<small>{made}.</small>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])


def _range(spread: Result, digits: int = 0, middle: str = "median") -> str:
    return f"{spread[middle]:,.{digits}f} ({spread['low']:,.{digits}f} to {spread['high']:,.{digits}f})"


def _interval(pair: Sequence[float], digits: int, sign: str = "") -> str:
    return f"{pair[0]:{sign},.{digits}f} ± {pair[1]:,.{digits}f}"


def engine(result: Result) -> str:
    """Tokens/s of both sides, one line per workload and side."""
    rows = []
    for case in result["cases"]:
        for side, ratio in case["ratio"].items():
            label = case["workload"] + (", prompts sorted for `generate`" if side != "transformers" else "")
            speeds = case["tokens_per_s"]
            rows.append((label, str(case["slots"]), _range(speeds["embedded"]), _range(speeds[side]), _range(ratio, 2)))
    return _table(("workload", "slots", "embedded, tokens/s", "`generate`, tokens/s", "ratio"), rows)


def soak(result: Result) -> str:
    """Resident memory per process that was there at minute three."""
    rows = [
        (row["process"], *(f"{row[key]:,.1f}" for key in ("minute_3_mb", "end_mb", "peak_mb")),
         "-" if row["slope_mb_per_min"] is None else f"{row['slope_mb_per_min']:+.2f}")
        for row in result["processes"]
        if row["minute_3_mb"] is not None
    ]  # fmt: skip
    return _table(("process", "minute 3, MB", f"minute {result['minutes']:g}, MB", "peak, MB", "slope, MB/min"), rows)


def quickstart(result: Result) -> str:
    """One line per run: seeds that learn, then the controls."""
    rows = [
        (f"{row['kind'].replace('_', ' ')}, seed {row['seed']}", f"{row['accuracy_before']:.3f}",
         f"{row['accuracy_after']:.3f}", f"{row['wall_s']:,.0f}", f"{row['samples_per_s']:,.0f}",
         f"{row['staleness_mean']:.2f} / {row['staleness_max']}", row["audit"])
        for row in result["rows"]
    ]  # fmt: skip
    head = ("run", "accuracy before", "after", "wall, s", "samples/s", "staleness mean / max", "audit")
    return _table(head, rows)


def modes(result: Result) -> str:
    """Means with 95 % intervals, and the paired comparison with sync."""
    rows = []
    for mode, values in result["modes"].items():
        against = result["against_sync"].get(mode)
        rows.append((
            f"`{mode}`", _interval(values["accuracy_after"], 3), _interval(values["samples_per_s"], 0),
            _interval(values["tokens_per_s"], 0),
            _interval(against["accuracy_difference"], 3, "+") if against else "",
            _interval(against["throughput_ratio"], 2) if against else "",
        ))  # fmt: skip
    head = ("mode", "accuracy", "samples/s", "tokens/s", "accuracy minus sync", "samples/s over sync")
    return _table(head, rows)


def staleness(result: Result) -> str:
    """One line per bound and loss; brackets hold the lowest and highest seed."""
    rows = []
    for bound in result["bounds"]:
        for loss, points in result["points"].items():
            point, gain = points[bound], result["throughput_against_first_bound"][loss][bound]
            rows.append((
                f"{bound}, {loss}", _range(point["accuracy_after"], 3, "mean"),
                _range(point["samples_per_s"], 0, "mean"), f"{gain['mean']:.2f}",
                f"{point['staleness_mean']['mean']:.2f}", f"{point['ess']['mean']:.3f}",
            ))  # fmt: skip
    first = result["bounds"][0]
    head = ("max_staleness, loss", "final accuracy", "samples/s", f"over bound {first}", "mean staleness", "`ess`")
    differences = "; ".join(
        f"{bound}: {paired['mean']:+.3f}"
        + ("" if paired["half_width_95"] is None else f" ± {paired['half_width_95']:.3f}")
        for bound, paired in result["decoupled_minus_naive"].items()
    )
    seeds = ", ".join(str(seed) for seed in result["seeds"])
    words = (
        f"Accuracy of decoupled minus naive, paired by seed (seeds {seeds}), with its 95 % interval, by bound: "
        f"{differences}."
    )
    return f"{_table(head, rows)}\n\n{words}"


def routing(result: Result) -> str:
    """Emulated: one table for each kind of device. Real: two workers on the machine that is named."""
    parts = []
    for device in dict.fromkeys(entry["device"] for entry in result["emulated"]):
        rows = [
            (f"{entry['pool']}, {entry['policy']}", f"{entry['step_s']:.2f}", f"{entry['tail_s']:.2f}",
             f"{entry['prefill_tokens']:,.0f}", _times(entry["speedup"]))
            for entry in result["emulated"] if entry["device"] == device
        ]  # fmt: skip
        head = ("workers, policy", "step, s", "tail, s", "prefilled tokens", "against dealing in turn")
        parts.append(f"### Emulated: {device}\n\n{_table(head, rows)}")
    if "real" in result:
        rows = [
            (entry["policy"], f"{entry['samples_per_s']:.0f}", f"{entry['rollout_idle_share']:.2f}",
             f"{entry['num_migrated']:.0f}", _times(entry["speedup"]))
            for entry in result["real"]
        ]  # fmt: skip
        head = ("policy", "samples/s", "idle share", "answers moved", "against dealing in turn")
        parts.append(f"### Real: the quickstart in `sync`, two workers\n\n{_table(head, rows)}")
    return "\n\n".join(parts)


def _times(spread: Sequence[float]) -> str:
    return f"x {spread[0]:.3f} ± {spread[1]:.3f}"


def telemetry(result: Result) -> str:
    """Share of throughput lost against a bare run, by what watched it; negative where the bare run was slower."""
    rows = [
        (f"`{arm}`", *(_share_lost(result[arm][key]) for key in ("cpu_lost", "wall_lost")))
        for arm in ("watched", "sinks")
        if arm in result
    ]
    return _table(("", "lost by processor time", "lost by wall time"), rows)


def _share_lost(cost: Result) -> str:
    half = cost["half_width_95"]
    return f"{cost['mean']:+.2%}" + ("" if half is None else f" ± {half:.2%}")


def simulator(result: Result) -> str:
    """Predicted beside reported: the paper's tables and figures, then one's own runs, then how long it takes."""
    parts, texts = result["parts"], []
    if "paper" in parts:
        texts += _simulated_paper(parts["paper"])
    if "runs" in parts:
        rows = [
            (f"{row['run']} (`{row['mode']}`, bound {row['max_staleness']})", row["devices"], row["calibrated_on"],
             f"{row['predicted']:,.1f}", f"{row['measured']:,.1f}", f"{row['error']:+.1%}")
            for row in parts["runs"]["rows"]
        ]  # fmt: skip
        head = ("own run", "devices", "costs from", "samples/s predicted", "measured", "error")
        texts += ["### Own runs", _table(head, rows), _made(parts["runs"])]
    if "speed" in parts:
        rows = [
            (f"{row['gpus']:,} GPUs, {row['model']}, {row['workers']:,} workers", f"{row['steps']:,}",
             f"{row['samples']:,}", f"{row['wall_s']:.1f}", f"{row['cpu_s']:.1f}")
            for row in parts["speed"]["rows"]
        ]  # fmt: skip
        head = ("simulated", "steps", "answers", "s", "s of one core")
        texts += ["### How long it takes", _table(head, rows), _made(parts["speed"])]
    return "\n\n".join(texts)


def _simulated_paper(found: Result) -> list[str]:
    two = [
        ("unbounded" if row["eta"] is None else str(row["eta"]), f"{row['predicted']:,.0f}", f"{row['reported']:,.0f}",
         f"{row['predicted_to_sync']:.2f}", f"{row['reported_to_sync']:.2f}", f"{row['error']:+.0%}")
        for row in found["table_2"]
    ]  # fmt: skip
    four = [
        (f"{row['model']}, {row['context']:,}, {row['gpus']} GPUs", f"{row['predicted_gain']:.2f}",
         f"{row['reported_gain']:.2f}", f"{row['error']:+.0%}")
        for row in found["figure_4"]
    ]  # fmt: skip
    six = [
        (row["model"], f"{row['predicted']:,.0f} / {row['predicted_without']:,.0f}",
         f"{row['reported']:,.0f} / {row['reported_without']:,.0f}", f"{row['predicted_gain'] - 1:+.0%}",
         f"{row['reported_gain'] - 1:+.0%}", f"{row['error']:+.0%}")
        for row in found["figure_6b"]
    ]  # fmt: skip
    return [
        _simulated_rows(found, "one length of answers a task"),
        _simulated_rows(found["by_size"], "lengths that also differ by model size"),
        _table(("Table 2: max_staleness", "k tokens/s", "reported", "over sync", "reported", "error"), two),
        _table(("Figure 4: model, context", "over the fewest GPUs", "reported", "error"), four),
        _table(("Figure 6b", "k tokens/s with / without", "reported", "gain", "reported", "error"), six),
        _made(found),
    ]


def _simulated_rows(found: Result, assumed: str) -> str:
    reached = found["efficiencies"]
    rows = [
        (row["model"], *_hours(row, "sync"), *_hours(row, "async"), f"{row['predicted_ratio']:.2f}",
         f"{row['reported_ratio']:.2f}", f"{row['ratio_error']:+.0%}")
        for row in found["table_1"]
    ]  # fmt: skip
    words = (
        f"With {assumed}: a decode step of at least {reached['decode_floor_s'] * 1e3:.1f} ms, "
        f"{reached['bandwidth']:.0%} of the memory bandwidth, {reached['step_overhead_s']:.0f} s a step besides; the "
        f"four synchronous rows are met within {found['fit_error']:.0%} (root mean square)."
    )
    head = ("Table 1", "sync, h", "reported", "error", "async, h", "reported", "error", "ratio", "reported", "error")
    return f"{words}\n\n{_table(head, rows)}"


def _hours(row: Result, mode: str) -> tuple[str, ...]:
    return f"{row[f'predicted_{mode}_h']:.1f}", f"{row[f'{mode}_h']:.1f}", f"{row[f'{mode}_error']:+.0%}"


def _made(part: Result) -> str:
    return f"<small>`{part['command']}`, {part['date']}.</small>"


def controller(result: Result) -> str:
    """Median and range over repeats, by kind and number of workers."""
    cases: dict[tuple[str, int], list[Result]] = {}
    for row in result["rows"]:
        cases.setdefault((row["kind"], row["workers"]), []).append(row)
    rows = []
    for (kind, workers), found in cases.items():
        speeds, costs = (sorted(row[key] for row in found) for key in ("trajectories_per_s", "cpu_ms_per_trajectory"))
        middle = len(found) // 2
        rows.append((kind, str(workers), f"{speeds[middle]:,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})",
                     f"{costs[middle]:.3f} ({costs[0]:.3f} to {costs[-1]:.3f})"))  # fmt: skip
    return _table(("", "workers", "trajectories/s", "CPU ms for each"), rows)


def reward(result: Result) -> str:
    """Verdicts per second, then what a sandboxed program costs."""
    rows = [
        (name, _range(told), f"{told['target']:.0f}" if "target" in told else "", f"{told['verdicts']:,}")
        for name, told in result["throughput"].items()
    ]
    head = (f"{result['workers']} scoring processes", "verdicts/s", "asked for", "verdicts")
    costs = [(name.replace("_", " "), _range(told, 1)) for name, told in result["overhead_ms"].items()]
    return f"{_table(head, rows)}\n\n{_table(('one program on one core', 'ms'), costs)}"


def reward_rates(result: Result) -> str:
    """How many verdicts are what they must be, and which are not."""
    measured = {name: told for name, told in result.items() if isinstance(told, dict) and "as_they_must_be" in told}
    rows = [
        (name, f"{told['rows']:,}", f"{told['as_they_must_be']:,}", f"{told['as_they_must_be'] / told['rows']:.2%}")
        for name, told in measured.items()
    ]
    others = [f"- {name}: `{other}`" for name, told in measured.items() for other in told["others"]]
    return "\n".join([_table(("", "rows", "as they must be", "rate"), rows), "", *others])


def delta(result: Result) -> str:
    """Benchmark: delta."""
    head = ["published dtype", "learning rate", "whole version, bytes", "delta, median", "least", "most", "share"]
    rows = [
        [
            row["dtype"],
            f"{row['lr']:g}",
            *(f"{row[key]:,.0f}" for key in ("full_bytes", "median_bytes", "min_bytes", "max_bytes")),
            f"{row['share']:.1%}",
        ]
        for row in result["rows"]
    ]
    return _table(head, rows)


def engines(result: Result) -> str:
    """Benchmark: engines, and below it the paired differences."""
    rows = [
        [engine, *(f"{values[key][0]:,.{digits}f} ± {values[key][1]:,.{digits}f}" for key, digits in _ENGINE_COLUMNS)]
        for engine, values in result["engines"].items()
    ]
    difference, ratio = result["accuracy_difference"], result["throughput_ratio"]
    seeds = len({row["seed"] for row in result["rows"]})
    return (
        _table(["engine", "accuracy", "samples/s", "tokens/s"], rows)
        + f"\n\nSGLang against embedded, {seeds} seeds paired: accuracy {difference[0]:+.3f} ± {difference[1]:.3f}, "
        f"samples/s x {ratio[0]:.2f} ± {ratio[1]:.2f}."
    )


_ENGINE_COLUMNS = (("accuracy_after", 3), ("samples_per_s", 1), ("tokens_per_s", 0))


def weight_transfer(result: Result) -> str:
    """Benchmark: weight_transfer, and the machine's own limits below it."""
    keys = (
        "copy_ms", "write_ms", "stage_ms", "swap_ms", "seen_ms", "worst_ms", "allowed_ms", "slow", "refill_ms",
        "sent_mb",
    )  # fmt: skip
    keys = tuple(key for key in keys if key in result["rows"][0])  # an older result has fewer
    rows = [[row["way"], f"{row['mb']:.0f}", *(f"{row[key]:,.1f}" for key in keys)] for row in result["rows"]]
    limits = [
        [f"{row['mb']:.0f}", f"{row['memory_copy_ms']:,.1f}", f"{row['loopback_ms']:,.1f}"] for row in result["limits"]
    ]
    table = _table(["way", "MB", *(key.replace("_", " ") for key in keys)], rows)
    return table + "\n\n" + _table(["MB", "memory copy ms", "plain loopback ms"], limits)


def async_vs_sync(result: Result) -> str:
    """A table per kind of device: means over seeds, ratios to the tuned baseline paired by seed."""
    head = ("", "samples/s", "over sync", "at most", "bound", "trainer waits", "rollout idle", "staleness", "machine")
    parts = []
    for part, found in result["parts"].items():
        lines = found["lines"]
        for place in dict.fromkeys(line["place"] for line in lines):
            rows = [_contender(line) for line in lines if line["place"] == place]
            parts.append(f"**{place}**, {lines[0]['seeds']} seeds\n\n{_table(head, rows)}")
        parts.append(f"<small>{part}: `{found['command']}`, {found['date']}.</small>")
    return "\n\n".join(parts)


def _contender(line: Result) -> tuple[str, ...]:
    half = line["ratio_half_width_95"]
    shares = (line[key] for key in ("bound_share", "trainer_wait", "rollout_idle"))
    ratio = f"{line['ratio']:.2f}" + ("" if half is None else f" ± {half:.2f}")
    return (
        line["name"], f"{line['samples_per_s']:,.2f}", ratio,
        "" if line["ratio_at_most"] is None else f"{line['ratio_at_most']:.2f}",
        *("" if share is None else f"{share:.1%}" for share in shares), f"{line['staleness_mean']:.2f}",
        "" if line["late_share"] is None else f"{line['late_share']:.1%}",
    )  # fmt: skip


def interruption(result: Result) -> str:
    """One line per kind of device and way."""
    rows = []
    for line in result["lines"]:
        half = line["ratio_half_width_95"]
        ratio = f"{line['ratio']:.3f}" + ("" if half is None else f" ± {half:.3f}")
        shares = (f"{line[key]:.1%}" for key in ("rollout_idle", "rollout_paused", "rollout_prefill"))
        rows.append((f"{line['place']}: `{line['way']}`", f"{line['samples_per_s']:,.2f}", ratio, *shares))
    return _table(("", "samples/s", "over drain", "idle", "paused", "prefill"), rows)


def logprob_memory(result: Result) -> str:
    """One line per case."""
    rows = [
        (f"{row['predictions']:,} x {row['vocabulary']:,}", str(row["chunk"] or "whole"), f"{row['peak_mb']:,.0f}",
         f"{row['logits_mb']:,.0f}", f"{row['seconds']:.2f}")
        for row in result["rows"]
    ]  # fmt: skip
    return _table(("predictions x vocabulary", "chunk", "peak, MB", "one copy of the logits, MB", "s"), rows)


def peer_trl(result: Result) -> str:
    """One line per side and seed, then the ratios."""
    rows = [
        (f"{row['side']}, seed {row['seed']}", f"{row['lr']}", f"{row['samples_per_s']:,.0f}",
         "never" if row["time_to_s"] is None else f"{row['time_to_s']:,.0f}", f"{row['best']:.3f}")
        for row in result["rows"]
    ]  # fmt: skip
    head = ("", "learning rate", "samples/s", f"s to {result['accuracy']:.0%}", "best accuracy seen")
    words = []
    for key, what in (("time_ratio", "TRL's time over ours"), ("samples_ratio", "our samples/s over TRL's")):
        if (found := result[key]) is not None:
            half = found["half_width_95"]
            words.append(f"{what}: {found['mean']:.2f}" + ("" if half is None else f" ± {half:.2f}"))
    return _table(head, rows) + "\n\n" + "; ".join([*words, f"TRL {result['versions']['trl']}"]) + "."


def gpu_suite(result: Result) -> str:
    """One table per kind of case, its columns as the suite names them; what was skipped or failed says why."""
    rows = [row for part in result["parts"].values() for row in part["rows"]]
    parts = []
    for name in dict.fromkeys(row["table"] for row in rows):
        mine = [row for row in rows if row["table"] == name]
        columns = list(dict.fromkeys(key for row in mine for key in row if key not in ("table", "case", "status")))
        cells = [[f"{row['case']}{_unless_ok(row)}", *(_cell(row.get(key)) for key in columns)] for row in mine]
        parts.append(f"### {name.replace('_', ' ').capitalize()}\n\n{_table(['case', *columns], cells)}")
    return "\n\n".join(parts)


def _unless_ok(row: Result) -> str:
    return "" if row["status"] == "ok" else f" ({row['status']})"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def checkpoint(result: Result) -> str:
    """What one checkpoint at every step costs, and what the trainer does between steps."""
    cost, idle = result["cost"], result["idle"]
    rows = [
        ("training stands still (the copy)", f"{cost['stall_share']:.2%}"),
        ("a step takes longer, writing included", f"{cost['more_mean']:+.2%} ± {cost['more_95']:.2%}"),
        ("the same, median of the pairs", f"{cost['more_median']:+.2%}"),
        ("not computing between steps, all batches ready", f"{idle['idle_share']:.2%}"),
    ]
    words = (
        f"A step of {cost['tokens_per_step']:,} tokens takes {cost['step_s']:.2f} s; a checkpoint has "
        f"{cost['checkpoint_bytes'] / 1e6:.1f} MB and is on disk {cost['write_s'] * 1000:.0f} ms after its copy began. "
        f"{cost['pairs']} pairs of blocks; mean with its 95 % interval."
    )
    return f"{_table(('one checkpoint at every step', 'share of a step'), rows)}\n\n{words}"


def packing(result: Result) -> str:
    """Packed against padded, the ways to fill micro-batches, and how even ranks are."""
    rows = [
        (row["set"], f"{row['ratio']:.2f}x", *(f"{row['forms'][form]['tokens_per_s']:,.0f}" for form in _PACKERS),
         f"{row['budget_used_least']:.1%}", f"{row['imbalance_most']:.2%}")
        for row in result["rows"]
    ]  # fmt: skip
    head = (
        "lengths", "packed / padded", "Algorithm 1, tokens/s", "first fit, tokens/s", "fixed count, tokens/s",
        "budget used, least", "ranks differ, most",
    )  # fmt: skip
    return _table(head, rows)


_PACKERS = ("algorithm_1", "first_fit", "fixed_count")

TABLES: dict[str, Callable[[Result], str]] = {
    "async_vs_sync": async_vs_sync,
    "checkpoint": checkpoint,
    "controller": controller,
    "delta": delta,
    "engine": engine,
    "engines": engines,
    "gpu_suite": gpu_suite,
    "interruption": interruption,
    "logprob_memory": logprob_memory,
    "modes": modes,
    "packing": packing,
    "peer_trl": peer_trl,
    "quickstart": quickstart,
    "reward": reward,
    "reward_rates": reward_rates,
    "routing": routing,
    "simulator": simulator,
    "soak": soak,
    "staleness": staleness,
    "telemetry": telemetry,
    "weight_transfer": weight_transfer,
}
