"""The panels that are drawn of each result file, one function per benchmark.

Benchmarks with their own plot draw it in their module. The layout of a panel is in plots.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.plots import Panel, Series

Result = dict[str, Any]


def panels_of(name: str, result: Result) -> list[Panel]:
    """The panels of a result file; empty if the benchmark has none here."""
    return PLOTS[name](result) if name in PLOTS else []


def _spread(interval: Result, middle: str = "median") -> tuple[float, tuple[float, float]]:
    return interval[middle], (interval["low"], interval["high"])


def _from_spreads(name: str, results: Iterable[Result], middle: str = "median") -> Series:
    pairs = [_spread(one, middle) for one in results]
    return Series(name, [value for value, _ in pairs], [spread for _, spread in pairs])


def _from_intervals(name: str, pairs: Iterable[Sequence[float]]) -> Series:
    """Means and half widths; an infinite half width (one seed) is not drawn."""
    pairs_with_halves = [(mean, half if half is not None and half < float("inf") else None) for mean, half in pairs]
    spreads = [None if half is None else (mean - half, mean + half) for mean, half in pairs_with_halves]
    return Series(name, [mean for mean, _ in pairs_with_halves], spreads)


def _quickstart(result: Result) -> list[Panel]:
    rows = result["rows"]
    places = [f"{row['kind'].replace('_', ' ')}, seed {row['seed']}" for row in rows]
    series = [
        Series(name, [row[key] for row in rows])
        for name, key in (("before", "accuracy_before"), ("after", "accuracy_after"))
    ]
    return [Panel("greedy accuracy on held-out prompts", places, series, mark=0.9)]


def _preference(result: Result) -> list[Panel]:
    spreads = result["accuracy"]
    series = _from_spreads("after training, lowest to highest seed", spreads.values(), "mean")
    return [Panel("accuracy on held-out rows", list(spreads), [series], mark=0.5)]


def _learning_curves(result: Result) -> list[Panel]:
    return [
        Panel(
            f"{name}: greedy accuracy on held-out prompts", [float(point["step"]) for point in part["points"]],
            [Series(name, [point["accuracy"] for point in part["points"]])], axis="step",
        )
        for name, part in result["parts"].items()
    ]  # fmt: skip


def _tool_sum(result: Result) -> list[Panel]:
    panels = []
    for seed in dict.fromkeys(row["seed"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["seed"] == seed]
        places = [float(point["step"]) for point in rows[0]["curve"]]
        series = [Series(row["job"], [point["accuracy"] for point in row["curve"]]) for row in rows]
        panels.append(
            Panel(
                f"seed {seed}: greedy accuracy on held-out prompts", places, series, axis="step", mark=result["target"]
            )
        )
    return panels


def _transcripts(result: Result) -> list[Panel]:
    rows = [row for row in result["rows"] if row.get("rendered")]
    shares = [1 - row["same_again"] / row["rendered"] for row in rows]
    title = "share of continued prompts with other tokens if the whole conversation were tokenised again"
    return [Panel(title, [row["template"] for row in rows], [Series("", shares)])] if rows else []


def _quickstart_curves(part: Result) -> Panel:
    """The jobs of the first seed, or all seeds of a single job."""
    places = [float(step) for step, _ in part["rows"][0]["curve"]]
    jobs = list(dict.fromkeys(row["job"] for row in part["rows"]))
    is_single, first = len(jobs) == 1, part["seeds"][0]
    series = [
        Series(f"seed {row['seed']}" if is_single else row["job"], [accuracy for _, accuracy in row["curve"]])
        for row in part["rows"]
        if is_single or row["seed"] == first
    ]
    title = jobs[0] if is_single else f"seed {first}"
    return Panel(f"quickstart, {title}: greedy accuracy", places, series, axis="step")


def _objectives(result: Result) -> list[Panel]:
    panels = []
    for name, part in result["parts"].items():
        if name.partition(",")[0] == "quickstart":
            panels.append(_quickstart_curves(part))
            continue
        if name.startswith("gradients"):  # more variants than a reader can distinguish as lines
            largest = [str(lag) for lag in part["lags"][-2:]]
            series = [
                _from_intervals(f"lag {lag}", [by_lag[lag]["single"] for by_lag in part["summary"].values()])
                for lag in largest
            ]
            panels.append(Panel(f"{name}: cosine with the on-policy gradient", list(part["summary"]), series))
            continue
        series = [_from_intervals(variant, list(by_lag.values())) for variant, by_lag in part["summary"].items()]
        places = [math.log2(lag + 1) for lag in part["lags"]]
        panels.append(Panel(f"{name}: greedy accuracy", places, series, axis="log2(lag + 1)"))
    return panels


def _paired(result: Result) -> list[Panel]:
    sides = result["sides"]
    return [
        Panel(title, list(sides), [_from_intervals(title, (values[key] for values in sides.values()))])
        for title, key in (("accuracy, 95 % interval", "accuracy_after"), ("samples/s, 95 % interval", "samples_per_s"))
    ]


def _engine(result: Result) -> list[Panel]:
    ratios = {
        f"{case['workload']}, {case['slots']} slots: {side}": ratio
        for case in result["cases"]
        for side, ratio in case["ratio"].items()
    }
    return [Panel("embedded engine over others, tokens/s", list(ratios), [_from_spreads("", ratios.values())], mark=1)]


def _soak(result: Result) -> list[Panel]:
    rows = [row for row in result["processes"] if row["minute_3_mb"] is not None]
    series = [
        Series(name, [row[key] for row in rows])
        for name, key in (("minute 3", "minute_3_mb"), (f"minute {result['minutes']:g}", "end_mb"))
    ]
    return [Panel("resident memory, MB", [row["process"] for row in rows], series)]


def _reward(result: Result) -> list[Panel]:
    speed, cost = result["throughput"], result["overhead_ms"]
    return [
        Panel("verdicts/s", list(speed), [_from_spreads("", speed.values())], is_logarithmic=True),
        Panel("one program on one core, ms", [name.replace("_", " ") for name in cost],
              [_from_spreads("", cost.values())]),
    ]  # fmt: skip


def _reward_rates(result: Result) -> list[Panel]:
    kinds = {name: one for name, one in result.items() if isinstance(one, dict) and "as_they_must_be" in one}
    shares = [one["as_they_must_be"] / one["rows"] for one in kinds.values()]
    return [Panel("verdicts that are as they must be", list(kinds), [Series("", shares)])]


def _probe_faults(result: Result) -> list[Panel]:
    times = [row["cpu_s"] for row in result["rows"]]
    return [Panel("processor time of one probe, s", [row["set_up"] for row in result["rows"]], [Series("", times)])]


def _diagnosis(result: Result) -> list[Panel]:
    counts = result["counts"]
    kinds = ("right", "miss", "wrong cause", "false alarm")
    series = [Series(kind, [count.get(kind, 0) for count in counts.values()]) for kind in kinds]
    return [Panel("first findings, number of runs", list(counts), series)]


def _dashboard(result: Result) -> list[Panel]:
    share = Series("", [100 * result["share_of_core"]])
    return [Panel("share of one core, %", [f"{result['viewers']} viewers"], [share], mark=100 * result["limit"])]


def _telemetry(result: Result) -> list[Panel]:
    arms = [arm for arm in ("watched", "sinks") if arm in result]
    series = []
    for name, key in (("processor time", "cpu_lost"), ("wall time", "wall_lost")):
        measured = [result[arm][key] for arm in arms]
        halves = [100 * (math.inf if one["half_width_95"] is None else one["half_width_95"]) for one in measured]
        series.append(_from_intervals(name, zip([100 * one["mean"] for one in measured], halves, strict=True)))
    return [Panel("throughput lost, %, 95 % interval", arms, series, mark=100 * result["limit"])]


def _weight_transfer(result: Result) -> list[Panel]:
    panels = []
    for size in sorted({row["mb"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["mb"] == size]
        series = [
            Series(name, [row[key] for row in rows])
            for name, key in (("seen", "seen_ms"), ("allowed", "allowed_ms"))
            if key in rows[0]
        ]
        panels.append(Panel(f"pause of generation, ms, {size:.0f} MB", [row["way"] for row in rows], series,
                            is_logarithmic=True))  # fmt: skip
    return panels


def _delta(result: Result) -> list[Panel]:
    rates = sorted({row["lr"] for row in result["rows"]})
    series = []
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["dtype"] == dtype]
        shares = {row["lr"]: 100 * sum(row["sizes"]) / len(row["sizes"]) / row["full_bytes"] for row in rows}
        series.append(Series(dtype, [shares.get(rate) for rate in rates]))
    return [Panel("bytes of a version, mean, % of a whole one", rates, series, axis="learning rate")]


def _packing(result: Result) -> list[Panel]:
    places = [row["set"].replace("_", " ") for row in result["rows"]]
    series = []
    for form, name in (("padded", "in the order they came"), ("sorted", "longest first")):
        ratios = [sorted(row["padding"][form]["ratio"]) for row in result["rows"]]
        series.append(Series(name, [one[len(one) // 2] for one in ratios], [(one[0], one[-1]) for one in ratios]))
    return [Panel("packed over padded, tokens/s", places, series, mark=1)]


def _checkpoint(result: Result) -> list[Panel]:
    cost, idle = result["cost"], result["idle"]
    places = ["training stands still", "a step takes longer", "idle between steps"]
    more = (100 * (cost["more_mean"] - cost["more_95"]), 100 * (cost["more_mean"] + cost["more_95"]))
    values = [100 * value for value in (cost["stall_share"], cost["more_mean"], idle["idle_share"])]
    return [Panel("cost of one checkpoint a step, %", places, [Series("", values, [None, more, None])], mark=2)]


def _controller(result: Result) -> list[Panel]:
    kinds = list(dict.fromkeys(row["kind"] for row in result["rows"]))
    counts = sorted({row["workers"] for row in result["rows"]})
    panels = []
    for title, key in (("trajectories of 2,000 tokens a second", "trajectories_per_s"),
                       ("processor time of each, ms", "cpu_ms_per_trajectory")):  # fmt: skip
        series = []
        for kind in kinds:
            found = [
                sorted(row[key] for row in result["rows"] if (row["kind"], row["workers"]) == (kind, count))
                for count in counts
            ]
            series.append(Series(kind, [one[len(one) // 2] if one else None for one in found],
                                 [(one[0], one[-1]) if one else None for one in found]))  # fmt: skip
        panels.append(Panel(title, [float(count) for count in counts], series, axis="workers"))
    return panels


def _interruption(result: Result) -> list[Panel]:
    lines = [line for part in result["parts"].values() for line in part["lines"]]
    ways = list(dict.fromkeys(line["way"] for line in lines))
    places = list(dict.fromkeys(line["place"] for line in lines))
    found = {(line["place"], line["way"]): (line["ratio"], line["ratio_half_width_95"]) for line in lines}
    series = [_from_intervals(way, (found[place, way] for place in places)) for way in ways]
    narrow = [place.replace(", floor", ",\nfloor") for place in places]
    return [Panel("tokens/s over drain, 95 % interval", narrow, series, mark=1)]


def _logprob_memory(result: Result) -> list[Panel]:
    rows = result["rows"]
    cases = list(dict.fromkeys((row["predictions"], row["vocabulary"]) for row in rows))
    chunks = list(dict.fromkeys(row["chunk"] for row in rows))
    found = {(row["predictions"], row["vocabulary"], row["chunk"]): row["peak_mb"] for row in rows}
    series = [
        Series(f"chunk {chunk}" if chunk else "whole logits", [found.get((*case, chunk)) for case in cases])
        for chunk in chunks
    ]
    places = [f"{num:,} x {vocabulary:,}" for num, vocabulary in cases]
    return [Panel("peak memory, MB", places, series, is_logarithmic=True)]


def _sharded_memory(result: Result) -> list[Panel]:
    rows = [row for row in result["rows"] if row["share_mb"] is not None]
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    peaks = [max(row["peak_mb"] for row in rows if row["phase"] == phase) for phase in phases]
    shares = [next(row["share_mb"] for row in rows if row["phase"] == phase) for phase in phases]
    limits = [share + result["limit_buckets"] * result["bucket_mb"] for share in shares]
    series = [Series("share", shares), Series("largest peak", peaks), Series("limit", limits)]
    return [Panel("tensors of one rank, MB", phases, series)]


def _checkpoint_parts(result: Result) -> list[Panel]:
    rows = result["rows"]
    return [
        Panel("until it is on disk, s", [row["way"] for row in rows], [Series("", [row["write_s"] for row in rows])])
    ]


def _memory(result: Result) -> list[Panel]:
    rows = result["rows"]
    series = [Series(name, [row[f"{name}_bytes"] / 1e6 for row in rows]) for name in ("measured", "predicted")]
    return [Panel("peak of a training step, MB", [row["case"] for row in rows], series)]


def _long_sequences(result: Result) -> list[Panel]:
    rows = result["rows"]
    places = [f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}" for row in rows]
    return [Panel("peak of a rank, MB", places, [Series("", [row["peak_bytes"] / 1e6 for row in rows])])]


def _experts(result: Result) -> list[Panel]:
    rows = result["rows"]
    places = [f"{row['hidden']} x {row['inner']}, {row['tokens']:,} tokens, {row['dtype']}" for row in rows]
    series = [
        Series(
            name,
            [sorted(row[key])[len(row[key]) // 2] for row in rows],
            [(min(row[key]), max(row[key])) for row in rows],
        )
        for name, key in (("loop", "loop_ratio"), ("transformers' grouped_mm", "transformers_ratio"))
    ]
    return [Panel("processor time over ours", places, series, mark=1)]


def _prompt_sharing(result: Result) -> list[Panel]:
    rows = result["rows"]
    places = [f"{row['slots']} x {row['answer_mean']} tokens, {row['prompts']} prompts" for row in rows]
    series = [_from_spreads("", [row["ratio"] for row in rows])]
    return [Panel("time to rebuild caches, each prompt alone over once a group", places, series, mark=1)]


def _sessions(result: Result) -> list[Panel]:
    rows = result["rows"]
    places = [f"{row['task']}, {row['slots']} slots" for row in rows]
    series = [_from_spreads("", [row["ratio"] for row in rows])]
    return [Panel("tokens/s of episodes of several turns, kept over not kept", places, series, mark=1)]


def _row_order(result: Result) -> list[Panel]:
    rows = result["rows"]
    places = [f"{row['slots']} slots, {row['lengths']}" for row in rows]
    series = [_from_spreads("", [row["ratio"] for row in rows])]
    return [Panel("processor time a token, one block of rows over several", places, series, mark=1)]


def _divergence(result: Result) -> list[Panel]:
    rows = [row for row in result["rows"] if row["is_driven_too_hard"]]
    measured = [Series(name, [row[key] for row in rows]) for name, key in (("warned", "warned"), ("fallen", "fell"))]
    return [
        Panel("step of the first warning, and of the fall", [f"{row['loss']}, {row['seed']}" for row in rows], measured)
    ]


def _sweep(result: Result) -> list[Panel]:
    lines = result["lines"]
    places = [line["value"] for line in lines]
    shown = (("accuracy_after", "final accuracy"), ("samples_per_s", "samples/s"))
    return [
        Panel(f"{title} by {lines[0]['key']}", places, [_from_spreads("", [line[key] for line in lines], "mean")])
        for key, title in shown
        if None not in [line[key] for line in lines]
    ]


def _peer_trl(result: Result) -> list[Panel]:
    sides = list(dict.fromkeys(row["side"] for row in result["rows"]))
    seeds = sorted({row["seed"] for row in result["rows"]})
    found = {(row["side"], row["seed"]): row for row in result["rows"]}
    panels = []
    for title, key in ((f"seconds to {result['accuracy']:.0%} accuracy", "time_to_s"), ("samples/s", "samples_per_s")):
        series = [
            Series(side, [found[side, seed][key] if (side, seed) in found else None for seed in seeds])
            for side in sides
        ]
        panels.append(Panel(title, [f"seed {seed}" for seed in seeds], series))
    return panels


def _routing(result: Result) -> list[Panel]:
    panels = []
    policies = [
        name for name in dict.fromkeys(entry["policy"] for entry in result["emulated"]) if name != "round_robin"
    ]
    for device in dict.fromkeys(entry["device"] for entry in result["emulated"]):
        own = [entry for entry in result["emulated"] if entry["device"] == device]
        pools = list(dict.fromkeys(entry["pool"] for entry in own))
        found = {(entry["pool"], entry["policy"]): entry["speedup"] for entry in own}
        series = [_from_intervals(policy, (found[pool, policy] for pool in pools)) for policy in policies]
        panels.append(Panel(f"over dealing in turn, emulated: {device}", pools, series, mark=1))
    if "real" in result:
        own = [entry for entry in result["real"] if entry["policy"] != "round_robin"]
        series = [_from_intervals("", (entry["speedup"] for entry in own))]
        panels.append(
            Panel("over dealing in turn, two real workers", [entry["policy"] for entry in own], series, mark=1)
        )
    return panels


def _reward_service(result: Result) -> list[Panel]:
    kinds = [name for name, entry in result.items() if isinstance(entry, dict) and "recovery_s" in entry]
    worst = Series("", [max(result[kind]["recovery_s"]) for kind in kinds])
    return [Panel("seconds until the service is whole again, at most", kinds, [worst])]


def _gpu_suite(result: Result) -> list[Panel]:
    """Tokens or samples per second of every case that has them, one panel per table."""
    rows = [row for part in result["parts"].values() for row in part["rows"]]
    panels = []
    for table in dict.fromkeys(row["table"] for row in rows):
        for key in ("samples_per_s", "tokens_per_s"):
            own = [row for row in rows if row["table"] == table and row.get(key) is not None]
            if own:
                values_of_key = Series("", [row[key] for row in own])
                panels.append(
                    Panel(f"{table}: {key.replace('_per_', '/')}", [row["case"] for row in own], [values_of_key])
                )
                break
    return panels


def _data_faults(result: Result) -> list[Panel]:
    series = [Series(name, [one[name] for one in result["kinds"]]) for name in ("recall", "precision")]
    return [Panel("recall and precision", [one["kind"] for one in result["kinds"]], series)]


def _capsules(result: Result) -> list[Panel]:
    kinds = {"repeated bit for bit": "equal", "changed bytes found": "found"}
    series = [Series(words, [row[key] / row["capsules"] for row in result["runs"]]) for words, key in kinds.items()]
    return [Panel("share of the capsules", [row["run"] for row in result["runs"]], series)]


def _equalities(result: Result) -> list[Panel]:
    seeds = [one["policies"] for one in result["seeds"]]
    same = [sum(one[name] == one["sync"] for one in seeds) for name in seeds[0]]
    return [
        Panel(f"final policies equal to that of mode sync, of {len(seeds)} seeds", list(seeds[0]), [Series("", same)])
    ]


def _regeneration(result: Result) -> list[Panel]:
    others = ("different_tokens", "different_logprobs", "different_ends")
    series = [
        Series("ties", [one["ties"] for one in result["seeds"]]),
        Series("other differences", [sum(one[name] for name in others) for one in result["seeds"]]),
    ]
    return [Panel("tokens that differ", [f"seed {one['seed']}" for one in result["seeds"]], series)]


def _chaos(result: Result) -> list[Panel]:
    names = sorted({fault["fault"] for fault in result["faults"]})
    times = {
        name: sorted(fault["recovery_s"] for fault in result["faults"] if fault["fault"] == name) for name in names
    }
    spreads = [(found[0], found[-1]) for found in times.values()]
    medians = [statistics.median(found) for found in times.values()]
    return [Panel("seconds from the end of a fault until a step after it", names, [Series("", medians, spreads)])]


def _environments(result: Result) -> list[Panel]:
    phases = result["phases"]
    series = [Series("", [found["steps_per_s"] for found in phases.values()])]
    return [Panel(f"{result['episodes']:,} episodes at once: steps per second", list(phases), series)]


def _killed_runs(result: Result) -> list[Panel]:
    names = [name for name in ("environments", "agents") if name in result]
    series = [
        Series("samples trained on", [result[name]["trained"] for name in names]),
        Series("killed processes", [sum(result[name]["kills"].values()) for name in names]),
    ]
    return [Panel("samples and kills", names, series)]


PLOTS: dict[str, Callable[[Result], list[Panel]]] = {
    "capsules": _capsules,
    "chaos": _chaos,
    "checkpoint": _checkpoint,
    "controller": _controller,
    "delta": _delta,
    "divergence": _divergence,
    "engine": _engine,
    "engines": _paired,
    "environments": _environments,
    "equalities": _equalities,
    "gpu_suite": _gpu_suite,
    "interruption": _interruption,
    "killed_runs": _killed_runs,
    "learning_curves": _learning_curves,
    "objectives": _objectives,
    "logprob_memory": _logprob_memory,
    "sharded_memory": _sharded_memory,
    "checkpoint_parts": _checkpoint_parts,
    "memory": _memory,
    "long_sequences": _long_sequences,
    "experts": _experts,
    "modes": _paired,
    "packing": _packing,
    "peer_trl": _peer_trl,
    "probe_faults": _probe_faults,
    "diagnosis": _diagnosis,
    "data_faults": _data_faults,
    "dashboard": _dashboard,
    "prompt_sharing": _prompt_sharing,
    "sessions": _sessions,
    "row_order": _row_order,
    "preference": _preference,
    "quickstart": _quickstart,
    "regeneration": _regeneration,
    "reward": _reward,
    "reward_rates": _reward_rates,
    "reward_service": _reward_service,
    "routing": _routing,
    "soak": _soak,
    "sweep": _sweep,
    "telemetry": _telemetry,
    "tool_sum": _tool_sum,
    "transcripts": _transcripts,
    "weight_transfer": _weight_transfer,
}
