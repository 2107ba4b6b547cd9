"""Tables of benchmarks of single parts, from engines to GPUs, one function for each benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.fit_box import BOX
from benchmarks.tables.form import Result, interval, ranged, table


def engine(result: Result) -> str:
    """Tokens/s of the embedded engine and of every other side."""
    rows = []
    for case in result["cases"]:
        for side, ratio in case["ratio"].items():
            speeds = case["tokens_per_s"]
            cells = (ranged(speeds["embedded"]), side, ranged(speeds[side]), ranged(ratio, 2))
            rows.append((case["workload"], str(case["slots"]), *cells))
    return table(("workload", "slots", "embedded, tokens/s", "against", "tokens/s", "ratio"), rows)


def controller(result: Result) -> str:
    """Median and range over repeats, by kind and number of workers."""
    cases: dict[tuple[str, int], list[Result]] = {}
    for row in result["rows"]:
        cases.setdefault((row["kind"], row["workers"]), []).append(row)
    rows = []
    for (kind, workers), found in cases.items():
        speeds, costs = (sorted(row[key] for row in found) for key in ("trajectories_per_s", "cpu_ms_per_trajectory"))
        messages = sorted(row.get("messages_per_s", 0.0) for row in found)
        middle = len(found) // 2
        rows.append((kind, str(workers), f"{speeds[middle]:,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})",
                     f"{messages[middle]:,.0f}" if messages[0] else "-",
                     f"{costs[middle]:.3f} ({costs[0]:.3f} to {costs[-1]:.3f})"))  # fmt: skip
    return table(("", "workers", "trajectories/s", "messages/s in and out", "CPU ms for each"), rows)


def simulator(result: Result) -> str:
    """Predicted and reported figures: the paper's tables and figures, a user's own runs, and the simulator's time."""
    parts, texts = result["parts"], []
    if "paper" in parts:
        texts += _simulated_paper(parts["paper"])
    if "batching" in parts:
        texts += [_batching(parts["batching"]["rows"]), _made(parts["batching"])]
    if "runs" in parts:
        own = [
            (f"{row['run']} (`{row['mode']}`, bound {row['max_staleness']})", row["devices"], row["calibrated_on"],
             f"{row['predicted']:,.1f}", f"{row['measured']:,.1f}", f"{row['error']:+.1%}")
            for row in parts["runs"]["rows"]
        ]  # fmt: skip
        head = ("own run", "devices", "costs from", "samples/s predicted", "measured", "error")
        texts += ["### Own runs", table(head, own), _made(parts["runs"])]
    if "speed" in parts:
        rows = [
            (f"{row['gpus']:,} GPUs, {row['model']}, {row['workers']:,} workers", f"{row['steps']:,}",
             f"{row['samples']:,}", f"{row['wall_s']:.1f}", f"{row['cpu_s']:.1f}")
            for row in parts["speed"]["rows"]
        ]  # fmt: skip
        head = ("simulated", "steps", "answers", "s", "s of one core")
        texts += ["### How long it takes", table(head, rows), _made(parts["speed"])]
    return "\n\n".join(texts)


def _batching(found: Sequence[Result]) -> str:
    rows = [
        (row["model"], str(row["stages"]), f"{row['reported_packed']:,.0f} / {row['reported_fixed']:,.0f}",
         f"{row['predicted_gain'] - 1:+.0%}", f"{row['reported_gain'] - 1:+.0%}", f"{row['error']:+.0%}",
         _between(row["other_means"].values()), f"{row['by_prompt'] - 1:+.0%}")
        for row in found
    ]  # fmt: skip
    head = (
        "Figure 6a", "stages", "TFLOP/s packed / fixed, reported", "gain predicted", "reported", "error",
        "if answers are a fifth shorter or longer", "if prompt by prompt",
    )  # fmt: skip
    return table(head, rows)


def _between(gains: Iterable[float]) -> str:
    low, *_, high = sorted(gains)
    return f"{low - 1:+.0%} to {high - 1:+.0%}"


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
        _simulated_rows(found),
        table(("Table 2: max_staleness", "k tokens/s", "reported", "over sync", "reported", "error"), two),
        table(("Figure 4: model, context", "over the fewest GPUs", "reported", "error"), four),
        table(("Figure 6b", "k tokens/s with / without", "reported", "gain", "reported", "error"), six),
        _made(found),
    ]


def _simulated_rows(found: Result) -> str:
    reached = found["efficiencies"]
    rows = [
        (row["model"], *_hours(row, "sync"), *_hours(row, "async"), f"{row['predicted_ratio']:.2f}",
         f"{row['reported_ratio']:.2f}", f"{row['ratio_error']:+.0%}")
        for row in found["table_1"]
    ]  # fmt: skip
    words = (
        f"Fitted: a decode step of at least {reached['decode_floor_s'] * 1e3:.1f} ms, "
        f"{reached['bandwidth']:.0%} of the memory bandwidth, and a further {reached['step_overhead_s']:.0f} s per "
        f"step; the four synchronous rows are reproduced within {found['fit_error']:.0%} (root mean square)."
    )
    for name in found["at_bound"]:
        low, high = BOX[name]
        words += f" `{name}` is at a bound of its box ({low:g} to {high:g}), so it was not determined by the fit."
    head = ("Table 1", "sync, h", "reported", "error", "async, h", "reported", "error", "ratio", "reported", "error")
    return f"{words}\n\n{table(head, rows)}"


def _hours(row: Result, mode: str) -> tuple[str, ...]:
    return f"{row[f'predicted_{mode}_h']:.1f}", f"{row[f'{mode}_h']:.1f}", f"{row[f'{mode}_error']:+.0%}"


def _made(part: Result) -> str:
    return f"<small>`{part['command']}`, {part['date']}.</small>"


def routing(result: Result) -> str:
    """Emulated: one table for each kind of device. Real: two workers on the named machine."""
    parts = []
    for device in dict.fromkeys(entry["device"] for entry in result["emulated"]):
        rows = [
            (f"{entry['pool']}, {entry['policy']}", f"{entry['step_s']:.2f}", f"{entry['tail_s']:.2f}",
             f"{entry['prefill_tokens']:,.0f}", _times(entry["speedup"]))
            for entry in result["emulated"] if entry["device"] == device
        ]  # fmt: skip
        head = ("workers, policy", "step, s", "tail, s", "prefilled tokens", "against dealing in turn")
        parts.append(f"### Emulated: {device}\n\n{table(head, rows)}")
    if "real" in result:
        rows = [
            (entry["policy"], f"{entry['samples_per_s']:.0f}", f"{entry['rollout_idle_share']:.2f}",
             f"{entry['num_migrated']:.0f}", _times(entry["speedup"]))
            for entry in result["real"]
        ]  # fmt: skip
        head = ("policy", "samples/s", "idle share", "answers moved", "against dealing in turn")
        parts.append(f"### Real: the quickstart in `sync`, two workers\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def _times(spread: Sequence[float]) -> str:
    return f"x {interval(spread, 3)}"


def weight_transfer(result: Result) -> str:
    """Times of every way and size, and below them the machine's own limits."""
    keys = (
        "copy_ms", "write_ms", "stage_ms", "swap_ms", "seen_ms", "worst_ms", "allowed_ms", "slow", "refill_ms",
        "sent_mb",
    )  # fmt: skip
    keys = tuple(key for key in keys if key in result["rows"][0])  # an older result has fewer
    rows = [[row["way"], f"{row['mb']:.0f}", *(f"{row[key]:,.1f}" for key in keys)] for row in result["rows"]]
    limits = [
        [f"{row['mb']:.0f}", f"{row['memory_copy_ms']:,.1f}", f"{row['loopback_ms']:,.1f}"] for row in result["limits"]
    ]
    ways = table(["way", "MB", *(key.replace("_", " ") for key in keys)], rows)
    return ways + "\n\n" + table(["MB", "memory copy ms", "plain loopback ms"], limits)


def delta(result: Result) -> str:
    """Bytes of versions by dtype and learning rate."""
    head = [
        "published dtype", "learning rate", "whole version, bytes", "travels, median", "least", "most", "share, median",
        "share, mean",
    ]  # fmt: skip
    rows = [
        [
            row["dtype"],
            f"{row['lr']:g}",
            *(f"{row[key]:,.0f}" for key in ("full_bytes", "median_bytes", "min_bytes", "max_bytes")),
            f"{row['share']:.1%}",
            f"{statistics.mean(row['sizes']) / row['full_bytes']:.1%}",
        ]
        for row in result["rows"]
    ]
    return table(head, rows)


def preference(result: Result) -> str:
    """Training from files: one line per objective, with the spread over its seeds."""
    head = [
        "run",
        "accuracy before",
        "after, mean (lowest to highest)",
        "loss before",
        "after",
        "margin after",
        "CPU, s",
    ]
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["kind"] == kind]
        mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0] if isinstance(rows[0][key], float)}
        after = ranged(result["accuracy"][kind], 3, "mean")
        lines.append(
            [
                f"{kind}, {len(rows)} seeds", f"{mean['accuracy_before']:.3f}", after,
                f"{mean['loss_before']:.3f}", f"{mean['loss_after']:.3f}",
                f"{mean['margin_after']:.2f}" if "margin_after" in mean else "-", f"{mean['cpu_s']:.1f}",
            ]
        )  # fmt: skip
    return table(head, lines)


def prompt_sharing(result: Result) -> str:
    """Time to rebuild caches, with a group's prompt computed for each answer and once."""
    rows = [
        (f"{row['slots']} of {row['answer_mean']} tokens, groups of {row['group']}, {row['prompts']} prompts",
         f"{row['tokens_alone']:,}", f"{row['tokens_shared']:,}", ranged(row["alone_ms"], 1),
         ranged(row["shared_ms"], 1), ranged(row["ratio"], 2))
        for row in result["rows"]
    ]  # fmt: skip
    return table(("answers", "computed, each alone", "once a group", "ms, each alone", "once a group", "ratio"), rows)


def sessions(result: Result) -> str:
    """Multi-turn episodes, with and without keys and values kept between turns."""
    rows = [
        (f"{row['task']}, {row['slots']} slots", f"{row['prefilled_without']:.2f}", f"{row['prefilled_kept']:.2f}",
         *(ranged(row[f"{name}_per_s"], 0) for name in ("without", "kept", "one_turn")), ranged(row["ratio"], 2))
        for row in result["rows"]
    ]  # fmt: skip
    head = ("episodes", "prefilled per sampled token", "kept", "tokens/s", "kept", "in one turn", "ratio")
    return table(head, rows)


def row_order(result: Result) -> str:
    """Time per decoded token with one block of rows and with several."""
    rows = [
        (f"{row['slots']}", row["lengths"], f"{row['tokens']:,}", f"{row['moved_rows'] / row['steps']:.1f}",
         ranged(row["one_us"], 1), ranged(row["blocks_us"], 1), ranged(row["ratio"], 2))
        for row in result["rows"]
    ]  # fmt: skip
    head = ("slots", "lengths", "tokens", "rows moved per step", "us per token, one block", "blocks", "ratio")
    return table(head, rows)


def packing(result: Result) -> str:
    """Packed against padded batches, the ways to fill micro-batches, and the differences between ranks."""
    rows: list[Sequence[str]] = [
        (row["set"], *(_ratio(row["padding"][form]["ratio"]) for form in ("padded", "sorted")),
         *(f"{row['forms'][form]['tokens_per_s']:,.0f}" for form in _PACKERS),
         *(f"{row['padding'][form]['tokens_per_s']:,.0f}" for form in ("padded", "sorted")),
         f"{row['budget_used_least']:.1%}", f"{row['imbalance_most']:.2%}")
        for row in result["rows"]
    ]  # fmt: skip
    head = (
        "lengths", "packed / padded", "packed / sorted, then padded", "Algorithm 1, tokens/s", "first fit",
        "fixed count", "padded", "sorted, then padded", "budget used, least", "ranks differ, most",
    )  # fmt: skip
    return table(head, rows)


def _ratio(rounds: Sequence[float]) -> str:
    return f"{statistics.median(rounds):.2f}x ({min(rounds):.2f} to {max(rounds):.2f})"


_PACKERS = ("algorithm_1", "first_fit", "fixed_count")


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
    return table(("model", "parameters, M", "measured peak, MB", "predicted, MB", "difference"), rows)


def reward(result: Result) -> str:
    """Verdicts per second, then the time of a sandboxed program."""
    rows = [
        (name, ranged(entry), f"{entry['target']:.0f}" if "target" in entry else "", f"{entry['verdicts']:,}")
        for name, entry in result["throughput"].items()
    ]
    head = (f"{result['workers']} scoring processes", "verdicts/s", "target", "verdicts")
    costs = [(name.replace("_", " "), ranged(entry, 1)) for name, entry in result["overhead_ms"].items()]
    return f"{table(head, rows)}\n\n{table(('one program on one core', 'ms'), costs)}"


def reward_rates(result: Result) -> str:
    """Number of verdicts that are as expected, and a list of the others."""
    measured = {name: entry for name, entry in result.items() if isinstance(entry, dict) and "as_they_must_be" in entry}
    rows = [
        (name, f"{entry['rows']:,}", f"{entry['as_they_must_be']:,}", f"{entry['as_they_must_be'] / entry['rows']:.2%}")
        for name, entry in measured.items()
    ]
    others = [f"- {name}: `{other}`" for name, entry in measured.items() for other in entry["others"]]
    return "\n".join([table(("", "rows", "as expected", "rate"), rows), "", *others])


def reward_service(result: Result) -> str:
    """One line for each kind of faulty scorer: time until the pool was complete, and the rate of normal verdicts."""
    rows = [
        (_WILD.get(do, do), f"{statistics.median(entry['recovery_s']):.2f} ({min(entry['recovery_s']):.2f} to "
         f"{max(entry['recovery_s']):.2f})",
         *(f"{statistics.median(entry[key]):,.0f}" for key in ("alone_per_s", "beside_per_s")),
         f"{min(entry['beside_per_s']):,.0f}")
        for do, entry in result.items() if isinstance(entry, dict) and "recovery_s" in entry
    ]  # fmt: skip
    words = f"{result['rounds']} rounds; asked for: whole again within {result['limit_s']:g} s."
    head = ("a scorer that", "s until whole again", "honest verdicts/s before", "meanwhile", "meanwhile, least")
    return f"{words}\n\n{table(head, rows)}"


def environments(result: Result) -> str:
    """One line for each phase: lost episodes and the time of a step."""
    rows = [
        (phase, f"{found['kills']}", f"{found['failed']}", f"{found['lost']}", f"{found['steps_per_s']:,.0f}",
         f"{found['step_p50_s']:.3f}", f"{found['step_p99_s']:.2f}", f"{found['replayed']:,}")
        for phase, found in result["phases"].items()
    ]  # fmt: skip
    words = f"{result['episodes']:,} episodes of {result['turns']} turns at once, {result['processes']} processes."
    head = ("phase", "kills", "verdicts of failure", "episodes lost", "steps/s", "s a step", "p99", "calls replayed")
    return f"{words}\n\n{table(head, rows)}"


def killed_runs(result: Result) -> str:
    """One line for each run: the killed processes, and numbers of lost, repeated and remaining items."""
    rows = []
    for name in ("environments", "agents"):
        if (found := result.get(name)) is None:
            continue
        kills = ", ".join(f"{count} {kind}" for kind, count in found["kills"].items())
        rows.append(
            (name, f"{found['most_at_once']:,}", kills, f"{found['drawn']:,}", f"{found['consumed']:,}",
             f"{found['dropped']}", f"{found['in_flight']:,}", f"{found['trained']:,}", f"{found['failed']}",
             f"{len(found['findings'])}", f"{sum(map(len, found['left'].values()))}")
        )  # fmt: skip
    head = (
        "run", "at once", "killed", "groups drawn", "consumed", "dropped", "in flight at the end",
        "samples trained on, each once", "samples failed", "findings", "left behind",
    )  # fmt: skip
    memory = result.get("program_memory")
    words = "" if memory is None else (
        f"\n\nOne more agent program with OpenAI's SDK takes {memory['preloaded']:.0f} MB if its imports are "
        f"preloaded, and {memory['started']:.0f} MB otherwise."
    )  # fmt: skip
    return f"{table(head, rows)}{words}"


def chaos(result: Result) -> str:
    """One line for each kind of fault: how long it lasted, and the time until the run worked again."""
    rows = []
    for name in sorted({fault["fault"] for fault in result["faults"]}):
        mine = [fault for fault in result["faults"] if fault["fault"] == name]
        times = [fault["recovery_s"] for fault in mine]
        rows.append(
            (name, str(len(mine)), f"{statistics.median(fault['held_s'] for fault in mine):.1f}",
             f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})",
             str(sum(fault["resumes"] for fault in mine)))
        )  # fmt: skip
    head = ("fault", "times", "s it lasted", "s until a step after it", "resumed controllers")
    left = sum(map(len, result["left"].values()))
    words = (
        f"{result['minutes']:g} minutes with faults, {result['steps']:,} steps; without a fault a step took "
        f"{result['step_s']:.1f} s. `areal-like verify`: {result['verify']}; findings of the recount: "
        f"{len(result['findings'])}; groups dropped: {result['dropped']}; left behind: {left}. Accuracy: "
        f"{result['accuracy']['accuracy']:.3f} with faults and {result['accuracy_without']['accuracy']:.3f} without."
    )
    if result["disk_not_filled"]:
        words += f" The disk was not filled: {result['disk_not_filled']}."
    return f"{table(head, rows)}\n\n{words}"


def equalities(result: Result) -> str:
    """One line for each seed: what was killed when, and the digest of all policies if they are the same."""
    rows = []
    for row in result["seeds"]:
        digests = set(row["policies"].values())
        same = f"`{next(iter(digests))[:16]}`" if len(digests) == 1 else "DIFFERENT"
        kills = [", ".join(row["kills"][name]) for name in ("sync, killed", "bound 0, killed")]
        equal = sum(row["replays"].values())
        rows.append((str(row["seed"]), str(len(row["policies"])), same, *kills, f"{equal} of {len(row['replays'])}"))
    head = ("seed", "runs", "SHA-256 of all policies", "killed in sync", "killed with bound 0", "equal replays")
    return table(head, rows)


def capsules(result: Result) -> str:
    """One line for each run: its capsules, how many repeated, and in how many a changed byte was found."""
    rows = [
        (row["run"], str(row["capsules"]), str(row["updates"]), f"{row['tensors']:,}", f"{row['mb']}",
         f"{row['equal']} of {row['capsules']}", f"{row['found']} of {row['capsules']}")
        for row in result["runs"]
    ]  # fmt: skip
    head = ("run", "capsules", "updates", "gradients", "MB, at most", "equal", "changed bytes found and named")
    cpu, wall = result["cpu_s"] / 60, result["wall_s"] / 60
    return f"{table(head, rows)}\n\n{cpu:.1f} minutes of processor time in {wall:.1f} minutes, with the runs."


def regeneration(result: Result) -> str:
    """One line for each seed: tokens that were drawn again, ties and other differences."""
    rows = [
        (str(row["seed"]), f"{row['samples']:,}", f"{row['mixed']:,}", f"{row['tokens_drawn']:,}",
         f"{row['versions']} ({row['versions_replayed']})", str(row["ties"]),
         str(row["different_tokens"] + row["different_logprobs"] + row["different_ends"]),
         f"{row['largest_gap_nats']:.1e}", f"{row['wall_s']:.0f}")
        for row in result["seeds"]
    ]  # fmt: skip
    head = (
        "seed", "samples", "of several versions", "tokens", "versions (made again)", "ties", "other differences",
        "largest difference of a log-prob, nats", "s",
    )  # fmt: skip
    tokens = sum(row["tokens_drawn"] for row in result["seeds"])
    ties = sum(row["ties"] for row in result["seeds"])
    return f"{table(head, rows)}\n\n{tokens:,} tokens in all, {ties} of them ties."


def learning_curves(result: Result) -> str:
    """One line for each run: accuracy by step."""
    lines = []
    for name, part in result["parts"].items():
        points = ", ".join(f"{point['step']}: {point['accuracy']:.3f}" for point in part["points"])
        prompts = f"{part['points'][0]['prompts']:,} and {part['points'][-1]['prompts']:,}"
        lines.append((name, points, prompts, f"{part['wall_s'] / 60:.0f}", part["date"]))
    return table(("run", "step: accuracy", "prompts at first and at last", "minutes", "date"), lines)


def dashboard(result: Result) -> str:
    """Costs of viewers and of the first page."""
    rows = [
        ("processor time of the server a minute, s", f"{result['cpu_s_per_minute']:.2f}"),
        ("the same as share of one core", f"{result['share_of_core']:.2%}"),
        ("messages of a viewer a minute", f"{result['messages_per_minute']:.1f}"),
        ("data of a viewer a minute, kB", f"{result['kb_per_minute']:,.0f}"),
        ("first page: processor time of the server, s", f"{result['first_page']['cpu_s']:.2f}"),
        ("first page: data of its content, kB", f"{result['first_page']['kb']:,.0f}"),
    ]
    words = (
        f"{result['steps']:,} steps, {result['viewers']} viewers, a step every {result['step_s']:g} s, "
        f"{result['minutes']:g} minutes."
    )
    return f"{words}\n\n{table(('', 'measured'), rows)}"


_WILD = {"hang": "hangs", "segfault": "segfaults", "leak": "takes all the memory", "fork": "forks daemons"}


def gpu_suite(result: Result) -> str:
    """One table per kind of case, with the suite's column names; skipped and failed cases have a reason."""
    rows = [row for part in result["parts"].values() for row in part["rows"]]
    parts = []
    for name in dict.fromkeys(row["table"] for row in rows):
        mine = [row for row in rows if row["table"] == name]
        columns = list(dict.fromkeys(key for row in mine for key in row if key not in ("table", "case", "status")))
        cells = [[f"{row['case']}{_unless_ok(row)}", *(_cell(row.get(key)) for key in columns)] for row in mine]
        parts.append(f"### {name.replace('_', ' ').capitalize()}\n\n{table(['case', *columns], cells)}")
    return "\n\n".join(parts)


def _unless_ok(row: Result) -> str:
    return "" if row["status"] == "ok" else f" ({row['status']})"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")
