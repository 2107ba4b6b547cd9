"""Tables of benchmarks that run complete jobs, one function for each benchmark."""

from __future__ import annotations

from benchmarks.tables.form import SHOWN, Result, interval, ranged, ratio_words, spread_cell, table


def quickstart(result: Result) -> str:
    """One line per run: seeds that learn, then the controls."""
    rows = [
        (f"{row['kind'].replace('_', ' ')}, seed {row['seed']}", f"{row['accuracy_before']:.3f}",
         f"{row['accuracy_after']:.3f}", f"{row['wall_s']:,.0f}", f"{row['samples_per_s']:,.0f}",
         f"{row['staleness_mean']:.2f} / {row['staleness_max']}", row["audit"])
        for row in result["rows"]
    ]  # fmt: skip
    head = ("run", "accuracy before", "after", "wall, s", "samples/s", "staleness mean / max", "audit")
    return table(head, rows)


def paired(result: Result) -> str:
    """Means with 95 % intervals, and the comparison with the first side, paired by seed."""
    rows = []
    for side, values in result["sides"].items():
        against = result["against"].get(side)
        rows.append((
            f"`{side}`", interval(values["accuracy_after"], 3), interval(values["samples_per_s"], 0),
            interval(values["tokens_per_s"], 0),
            interval(against["accuracy_difference"], 3, "+") if against else "",
            interval(against["throughput_ratio"], 2) if against else "",
        ))  # fmt: skip
    base = result["base"]
    head = ("", "accuracy", "samples/s", "tokens/s", f"accuracy minus {base}", f"samples/s over {base}")
    return table(head, rows)


def async_vs_sync(result: Result) -> str:
    """One table per kind of device: means over seeds, ratios to the tuned baseline paired by seed."""
    head = (
        "", "samples/s", "over sync", "at most", "over apart", "bound", "trainer waits", "rollout idle", "staleness",
        "cores", "s to accuracy", "machine",
    )  # fmt: skip
    parts = []
    for part, found in result["parts"].items():
        lines = found["lines"]
        for place in dict.fromkeys(line["place"] for line in lines):
            rows = [_contender(line) for line in lines if line["place"] == place]
            speedup = lines[0].get("speedup")
            pace = f", {speedup:g} times as fast as such GPUs" if speedup else ""
            parts.append(f"**{place}**, {lines[0]['seeds']} seeds{pace}\n\n{table(head, rows)}")
        if found.get("tried"):
            parts.append(f"Baseline: {found['rows'][0]['tuned']} ({_tried(found['tried'])}).")
        parts.append(f"<small>{part}: `{found['command']}`, {found['date']}.</small>")
    return "\n\n".join(parts)


def _tried(tried: Result) -> str:
    """The candidates of the baseline, fastest first, then those that could not run."""
    rates = {name: rate for name, rate in tried.items() if isinstance(rate, float)}
    words = [f"{name} {rates[name]:,.2f}" for name in sorted(rates, key=lambda name: -rates[name])]
    words += [f"{name} failed: {why}" for name, why in tried.items() if name not in rates]
    return "samples/s over six steps: " + "; ".join(words)


def _contender(line: Result) -> tuple[str, ...]:
    half = line["ratio_half_width_95"]
    shares = (line[key] for key in ("trainer_wait", "rollout_idle"))
    ratio = f"{line['ratio']:.2f}" + ("" if half is None else f" ± {half:.2f}")
    return (
        line["name"], f"{line['samples_per_s']:,.2f}", ratio,
        *("" if line.get(key) is None else f"{line[key]:.2f}" for key in ("ratio_at_most", "ratio_to_apart")),
        _bound(line), *("" if share is None else f"{share:.1%}" for share in shares), f"{line['staleness_mean']:.2f}",
        "" if line.get("cores_used") is None else f"{line['cores_used']:.2f}",
        "" if line["time_to_s"] is None else f"{line['time_to_s']:,.1f}",
        "" if line["late_share"] is None else f"{line['late_share']:.1%}",
    )  # fmt: skip


def _bound(line: Result) -> str:
    """Share of the bound: the mean of the seeds, lowest and highest."""
    if line["bound_share"] is None:
        return ""
    seeds = line.get("bound_shares", [])
    spread = f" ({min(seeds):.0%} to {max(seeds):.0%})" if len(seeds) > 1 else ""
    return f"{line['bound_share']:.0%}{spread}"


def interruption(result: Result) -> str:
    """One table per kind of device, one line per way."""
    head = ("", "samples/s", "over drain", "idle", "paused", "prefill", "staleness", "machine")
    parts = []
    for place, found in result["parts"].items():
        rows = []
        for line in found["lines"]:
            half = line["ratio_half_width_95"]
            ratio = f"{line['ratio']:.3f}" + ("" if half is None else f" ± {half:.3f}")
            keys = ("rollout_idle", "rollout_paused", "rollout_prefill")
            shares = (f"{line[key]:.1%}" if key in line else "" for key in keys)
            late = f"{line['late_share']:.1%}" if "late_share" in line else ""
            rows.append((f"`{line['way']}`", f"{line['samples_per_s']:,.2f}", ratio, *shares,
                         f"{line['staleness_mean']:.2f}", late))  # fmt: skip
        stamp = f"<small>`{found['command']}`, {found['date']}.</small>"
        parts.append(f"**{place}**, {found['lines'][0]['seeds']} seeds\n\n{table(head, rows)}\n\n{stamp}")
    return "\n\n".join(parts)


def _warned(result: Result, bound: str, loss: str) -> int:
    """Number of runs with a finding of the report."""
    found = [row for row in result["rows"] if (row["max_staleness"], row["loss"]) == (bound, loss)]
    return sum(row["warned"] is not None for row in found)


def staleness(result: Result) -> str:
    """One line per bound and loss, with the lowest and highest seed in brackets."""
    rows = []
    is_watched = all("warned" in row for row in result["rows"])
    for bound in result["bounds"]:
        for loss, points in result["points"].items():
            point, gain = points[bound], result["throughput_against_first_bound"][loss][bound]
            rows.append((
                f"{bound}, {loss}", ranged(point["accuracy_after"], 3, "mean"),
                ranged(point["samples_per_s"], 0, "mean"), f"{gain['mean']:.2f}",
                f"{point['staleness_mean']['mean']:.2f}", f"{point['ess']['mean']:.3f}",
                *([str(_warned(result, bound, loss))] if is_watched else []),
            ))  # fmt: skip
    first = result["bounds"][0]
    head = ("max_staleness, loss", "final accuracy", "samples/s", f"over bound {first}", "mean staleness", "`ess`",
            *(["warned of"] if is_watched else []))  # fmt: skip
    seeds = ", ".join(str(seed) for seed in result["seeds"])
    against = [
        (f"{loss} minus naive", *(
            f"{paired['mean']:+.3f}" + ("" if paired["half_width_95"] is None else f" ± {paired['half_width_95']:.3f}")
            for paired in by_bound.values()
        ))
        for loss, by_bound in result["minus_naive"].items()
    ]  # fmt: skip
    words = f"Accuracy, paired by seed (seeds {seeds}), with its 95 % interval, by max_staleness:"
    text = f"{words}\n\n{table(('', *result['bounds']), against)}"
    return table(head, rows) + (f"\n\n{text}" if against else "")


def sweep(result: Result) -> str:
    """One line per value of the key: means over seeds, lowest and highest."""
    lines = result["lines"]
    rows = [(line["value"], *(spread_cell(line, name) for name in SHOWN)) for line in lines]
    return table((lines[0]["key"], *SHOWN), rows)


def divergence(result: Result) -> str:
    """One line per run: the steps of the report's first finding and of the fall in accuracy."""
    rows = [
        (f"{row['loss']}, seed {row['seed']}" + ("" if row["is_driven_too_hard"] else ", sound"),
         *("never" if row[key] is None else str(row[key]) for key in ("warned", "fell")),
         f"{row['best']:.3f}", f"{row['last']:.3f}", row["words"].partition(". ")[0] or "-")
        for row in result["rows"]
    ]  # fmt: skip
    return table(("", "warned at step", "fallen at step", "best accuracy", "last", "first words"), rows)


def peer_trl(result: Result) -> str:
    """One line per side and seed, then the ratios."""
    rows = [
        (f"{row['side']}, seed {row['seed']}", f"{row['samples_per_s']:,.0f}",
         "never" if row["time_to_s"] is None else f"{row['time_to_s']:,.0f}", f"{row['best']:.3f}")
        for row in result["rows"]
    ]  # fmt: skip
    head = ("", "samples/s", f"s to {result['accuracy']:.0%}", "best accuracy seen")
    words = [
        f"{side} tuned: " + ", ".join(f"{key.removeprefix('is_')} {value}" for key, value in settings.items())
        for side, settings in result["tuned"].items()
    ]
    for key, what in (("time_ratio", "TRL's time over ours"), ("samples_ratio", "our samples/s over TRL's")):
        if (found := result[key]) is not None:
            words.append(f"{what}: {ratio_words(found)}")
    return table(head, rows) + "\n\n" + "; ".join([*words, f"TRL {result['versions']['trl']}"]) + "."


def soak(result: Result) -> str:
    """Resident memory of each process that existed at minute three."""
    rows = [
        (row["process"], *(f"{row[key]:,.1f}" for key in ("minute_3_mb", "end_mb", "peak_mb")),
         "-" if row["slope_mb_per_min"] is None else f"{row['slope_mb_per_min']:+.2f}")
        for row in result["processes"]
        if row["minute_3_mb"] is not None
    ]  # fmt: skip
    return table(("process", "minute 3, MB", f"minute {result['minutes']:g}, MB", "peak, MB", "slope, MB/min"), rows)


def telemetry(result: Result) -> str:
    """Share of throughput lost against a bare run, by kind of monitoring; negative if the bare run was slower."""
    rows = [
        (f"`{arm}`", *(_share_lost(result[arm][key]) for key in ("cpu_lost", "wall_lost")))
        for arm in ("watched", "sinks")
        if arm in result
    ]
    return table(("", "lost by processor time", "lost by wall time"), rows)


def _share_lost(cost: Result) -> str:
    half = cost["half_width_95"]
    return f"{cost['mean']:+.2%}" + ("" if half is None else f" ± {half:.2%}")


def checkpoint(result: Result) -> str:
    """Cost of one checkpoint at every step, and the trainer's activity between steps."""
    cost, idle = result["cost"], result["idle"]
    rows = [
        ("training is blocked (the copy)", f"{cost['stall_share']:.2%}"),
        ("a step takes longer, writing included", f"{cost['more_mean']:+.2%} ± {cost['more_95']:.2%}"),
        ("the same, median of the pairs", f"{cost['more_median']:+.2%}"),
        ("not computing between steps, all batches ready", f"{idle['idle_share']:.2%}"),
    ]
    words = (
        f"A step of {cost['tokens_per_step']:,} tokens takes {cost['step_s']:.2f} s; a checkpoint has "
        f"{cost['checkpoint_bytes'] / 1e6:.1f} MB and is on disk {cost['write_s'] * 1000:.0f} ms after its copy began. "
        f"{cost['pairs']} pairs of blocks; mean with its 95 % interval."
    )
    return f"{table(('one checkpoint at every step', 'share of a step'), rows)}\n\n{words}"
