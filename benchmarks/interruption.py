"""What should a new version do to running answers: recompute their cache, keep it, or let them finish first?

    python -m benchmarks.interruption                                     emulated 1.5B and 7B, and real: about 2 hours
    python -m benchmarks.interruption --devices emulated:h800 --model 7b  one kind of device
    python -m benchmarks.interruption configs/mine.yaml key=value         your own job on its own devices
    python -m benchmarks.interruption --quick  emulated 1.5B, one seed, 8 steps; writes nothing

Results for your own job are written next to its runs (--runs-dir) and do not replace the published result.

`recompute` drops keys and values and prefills every running answer with the new weights (the default, and the paper's
method); `keep_kv` keeps the old ones; `drain` lets running answers finish first, as in a system without interruption
(arXiv 2505.24298, section 7.5, reports 12 % for 1.5B and 17 % for 7B over it, on other work). Emulated devices take the
time that a roofline gives (docs/decisions/0030-emulated-devices.md): those figures describe a model of hardware, with
three quarters of the GPUs for rollout, where the trainer has more work, and with half of them. All runs have
max_staleness 4, and seeds are paired; ratios are of tokens/s, since the counted steps contain different prompts.
Results are added to benchmarks/results/interruption.json as they arrive, one part for each kind of device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import Emulated
from benchmarks.folders import RESULTS
from benchmarks.measured import INTEGERS, NUMBERS, Measured, add_job, add_options, parse_job
from benchmarks.publishing import chosen
from benchmarks.runs import command_of, parts_with, train, write
from benchmarks.spreads import mean_interval
from benchmarks.steady import figures, refuse_distorted

RESULT = RESULTS / "interruption.json"
WAYS = ("drain", "recompute", "keep_kv")
BASE = "drain"
KEPT = ("samples_per_s", "tokens_per_s", "trainer_wait", "rollout_idle", "rollout_paused", "rollout_prefill",
        "staleness_mean", "late_share")  # fmt: skip
WHICH = ("--devices", "--model", "--shares")
"""Options that choose the parts that a command measures."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job(parser)
    parser.add_argument("--devices", default="", help="real, or emulated:GPU; both if neither this nor CONFIG is given")
    parser.add_argument("--model", default="", help="size of the emulated policy; 1.5b and 7b if not given")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--shares", type=NUMBERS, default="0.75,0.5", help="shares for rollout, comma-separated")
    parser.add_argument("--seeds", type=INTEGERS, default="1,2,3")
    parser.add_argument("--quick", action="store_true")
    add_options(parser)
    options = parse_job(parser)
    seeds = [1] if options.quick else options.seeds
    measured = Measured.of("interruption", options)
    for place, config, overrides in places(options):
        rows: list[Row] = []
        more = ["num_steps=8"] if options.quick else []
        for seed in seeds:
            settings = [*overrides, *more, *options.overrides]
            rows += measure(place, config, seed, settings, options.runs_dir, measured)
        print_table(compare(rows))
        if not options.quick:
            print(f"written to {keep(place, rows, publish_location(place, options))}")
    measured.finish()


def places(options: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    """(label, config, overrides) of each kind of device."""
    kind, _, gpu = options.devices.partition(":")
    if options.config:
        if options.devices or options.model:
            raise SystemExit("--devices and --model are not for a CONFIG: it names its own devices and model.")
        return [(f"{Path(options.config).stem}, its own devices", options.config, ["mode=async"])]
    if kind not in ("", "emulated", "real"):
        raise SystemExit(f"--devices {options.devices}: give real, or emulated:GPU; or a CONFIG for its own devices.")
    models = [options.model] if options.model else ["1.5b"] if options.quick else ["1.5b", "7b"]
    shares = options.shares[: 1 if options.quick else None]
    found = []
    if kind in ("", "emulated"):
        for model, share in itertools.product(models, shares):
            emulated = Emulated(gpu or "h800", model, options.gpus, share, 3.0)
            settings = [*emulated.batch(), *emulated.settings(is_sync=False)]
            found.append((f"{emulated.label}, {share:.0%} for rollout", "configs/emulated.yaml", settings))
    if kind == "real" or (not kind and not options.quick):
        short = ["data.eval=null", "eval.every_steps=0", "num_steps=40"]
        found.append(("this machine's cores", "configs/quickstart.yaml", short))
    return found


def measure(
    place: str, config: str, seed: int, overrides: Sequence[str], runs_dir: Path, measured: Measured
) -> list[Row]:
    """Run all ways on one seed, in turn."""
    rows = []
    for way in WAYS:
        settings = [f"seed={seed}", f"rollout.interruption={way}", "staleness.max_staleness=4", "metrics.report=false"]
        found = measured.row(
            [config, *settings, *overrides], partial(_figures, config, [*settings, *overrides], runs_dir)
        )
        rows.append({"place": place, "way": way, "seed": seed, **found})
        print(f"{place}  seed {seed}  {way:10} {rows[-1]['samples_per_s']:.2f} samples/s", flush=True)
    return rows


def _figures(config: str, settings: Sequence[str], runs_dir: Path) -> Row:
    folder = Path(train(config, settings, runs_dir)["folder"])
    found = figures(folder)
    refuse_distorted(found, folder)
    return {key: found.get(key) for key in KEPT}


def publish_location(place: str, options: argparse.Namespace) -> Path:
    """The result file for the rows of a place."""
    parts = json.loads(RESULT.read_text())["parts"] if RESULT.is_file() else {}
    made = parts[place]["command"] if place in parts else None
    return chosen("interruption", options, RESULT, made, WHICH)


def keep(place: str, rows: Sequence[Row], path: Path) -> Path:
    """Write a place's rows to a result file, replacing earlier ones of the same place."""
    parts = parts_with(path, place, command_of("interruption"), {"rows": list(rows), "lines": compare(rows)})
    return write("interruption", "python -m benchmarks.interruption", {"parts": parts}, path)


def compare(rows: Sequence[Row]) -> list[Row]:
    """Per place and way: means over seeds, and the ratio to `drain` paired by seed."""
    lines = []
    for place in dict.fromkeys(row["place"] for row in rows):
        base = {row["seed"]: row["tokens_per_s"] for row in rows if (row["place"], row["way"]) == (place, BASE)}
        for way in WAYS:
            own = [row for row in rows if (row["place"], row["way"]) == (place, way)]
            mean, half = mean_interval([row["tokens_per_s"] / base[row["seed"]] for row in own])
            means = {key: statistics.fmean(values) for key in KEPT if None not in (values := [r[key] for r in own])}
            spread = {"ratio": mean, "ratio_half_width_95": half, "seeds": len(own)}
            lines.append({"place": place, "way": way, **spread, **means})
    return lines


def print_table(lines: Sequence[Row]) -> None:
    """Print the comparison."""
    place = ""
    for line in lines:
        if line["place"] != place:
            place = line["place"]
            print(f"\n{place}\n{'':12}{'samples/s':>11}{'to drain':>16}{'idle':>8}{'paused':>8}{'prefill':>9}"
                  f"{'staleness':>11}")  # fmt: skip
        prefill = f"{line['rollout_prefill']:.1%}" if "rollout_prefill" in line else "-"
        half = "" if line["ratio_half_width_95"] is None else f" ± {line['ratio_half_width_95']:.3f}"
        ratio = f"{line['ratio']:.3f}{half}"
        print(f"{line['way']:12}{line['samples_per_s']:11.2f}{ratio:>16}{line['rollout_idle']:8.1%}"
              f"{line['rollout_paused']:8.1%}{prefill:>9}{line['staleness_mean']:11.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
