"""What does asynchrony gain over strict synchrony? Same devices, same samples, a tuned baseline.

    python -m benchmarks.async_vs_sync --devices emulated:h800 --model 1.5b                         3 seeds, an hour
    python -m benchmarks.async_vs_sync --devices emulated:h800 --model 1.5b --floors 0.9,6,12 --bounds 4    two hours
    python -m benchmarks.async_vs_sync --devices real          3 seeds, 16, 64 and 384 sequences per core: 1.5 hours
    python -m benchmarks.async_vs_sync --devices real --sequences 64 --lengths thinking@28          forced, half an hour
    python -m benchmarks.async_vs_sync --devices emulated:h800 --model 7b --quick                     a few minutes
    python -m benchmarks.async_vs_sync configs/mine.yaml trainer.optimizer.lr=1e-5    your own job on its own devices

*sync*: all devices generate, wait for the longest answer, then all train. Its settings are the best of a small search,
which is listed with the result. For a user's job, candidates that cannot run are left out.
*sync, pools apart*: on emulated devices also the paper's setting, with a separate pool for each phase.
*one_step_off*: batch n+1 is generated while batch n trains. *async N*: max_staleness N.

Emulated devices take the time that a roofline gives (docs/decisions/0030-emulated-devices.md), everything else is real:
these figures describe a model of hardware. Answer lengths on emulated devices are those of a thinking model; on real
ones they are the model's own, or forced (--lengths thinking@28: the same distribution, scaled to this mean).

`bound share` is the rate divided by the rate of the pool with more work if it never waited (benchmarks/steady.py);
`at most` is the ratio to sync at that rate. A user's config keeps its batch and its pools: asynchronous modes use them
as they are; the baseline uses them in turn, or all devices in both phases (on GPUs: colocated), whichever is faster.
With --accuracy X, runs on real devices evaluate every few steps, and the time to X is reported.

Results are added to benchmarks/results/async_vs_sync.json as they arrive, one part for each setting of the devices
(--floors, --sequences). Results of a user's job (CONFIG or overrides), and of a published part that another command
(apart from --floors and --sequences) has made, are written next to the runs (--runs-dir); --replace publishes them. A
run that the machine distorted by more than 5 % ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from benchmarks import pictures
from benchmarks.contenders import APART, EMULATED, FORCED, PLANNED, Contender, Emulated, Own, Real
from benchmarks.folders import RESULTS
from benchmarks.measured import INTEGERS, NUMBERS, Measured, add_job, add_options, parse_job
from benchmarks.publishing import chosen
from benchmarks.runs import JobFailed, command_of, parts_with, train, write
from benchmarks.spreads import mean_interval
from benchmarks.steady import alone, figures, refuse_distorted, time_to, window_of
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.wiring.process_specs import num_cores

RESULT = RESULTS / "async_vs_sync.json"
DEFAULTS = {"emulated": "configs/emulated.yaml", "real": "configs/quickstart.yaml"}
"""Default config by kind of devices."""
KEPT = (
    "samples_per_s", "tokens_per_s", "step_s", "step_work", "step_sampled", "trainer_wait", "rollout_idle",
    "rollout_paused", "rollout_prefill", "staleness_mean", "bound_share", "trainer_alone_s", "rollout_alone_s",
    "late_share", "time_to_s", "speedup", "steps_counted", "cores_used",
)  # fmt: skip
FEWEST_COUNTED = 2
"""Smallest number of steps over which a rate is measured."""
WHICH = ("--floors", "--sequences")
"""Options that choose the parts that a command measures."""
Row = dict[str, Any]


def main() -> None:
    options = parse()
    kind, _, gpu = (options.devices or ("own" if options.config else "emulated")).partition(":")
    config, batch = options.config or DEFAULTS.get(kind, ""), []
    places: list[Emulated | Real | Own]
    if kind == "emulated":
        emulated = [
            Emulated(gpu or "h800", options.model, options.gpus, options.share, floor) for floor in options.floors
        ]
        batch = [] if options.config else emulated[0].batch()
        places = [*emulated]
    elif kind == "real":
        counts = [64] if options.quick else options.sequences
        places = [Real(count, num_cores(), lengths=options.lengths, accuracy=options.accuracy) for count in counts]
    elif kind == "own" and config:
        places = [Own(config, tuple(options.overrides), num_cores(), options.lengths)]
        options.overrides = []
    else:
        raise SystemExit(f"--devices {options.devices}: give real, emulated:GPU, or own with a CONFIG.")
    if options.lengths and kind == "emulated":
        raise SystemExit("--lengths is for other than emulated devices: those have emulation.mean_tokens.")
    if options.lengths and options.accuracy is not None:
        raise SystemExit(
            "--lengths and --accuracy are mutually exclusive: the policy does not end forced answers itself."
        )
    seeds = [1] if options.quick else options.seeds
    extra = ["metrics.report=false", *batch] + (["num_steps=12"] if options.quick else [])
    if kind != "emulated" and options.accuracy is None:
        extra += ["data.eval=null", "eval.every_steps=0"]
    elif kind != "emulated":
        extra.append(f"eval.every_steps={options.eval_every}")
    measured = Measured.of("async_vs_sync", options)
    runner = Runner(config, [*extra, *options.overrides], options.runs_dir, options.accuracy, measured)
    for place in places:
        is_changed = options.config and kind != "own"
        part = f"{Path(config).stem}: {place.label}" if is_changed else place.label
        path = RESULT if options.quick else publish_location(part, options)
        try:
            rows = runner.compare(place, seeds, options.bounds, is_planning=not options.no_plan)
        except UserError as error:
            raise SystemExit(str(error)) from error
        print_table(rows)
        if not options.quick:
            print(f"written to {keep(part, rows, path, runner.tried)}")
    measured.finish()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job(parser)
    parser.add_argument("--devices", default="", help="emulated:GPU, real (cores), or own: those of CONFIG")
    parser.add_argument("--model", default="1.5b", help="size of the emulated policy")
    parser.add_argument("--gpus", type=int, default=8, help="emulated GPUs")
    parser.add_argument("--share", type=float, default=0.75, help="share of the GPUs for rollout, except in sync")
    parser.add_argument("--floors", type=NUMBERS, default="3", help="shortest decode step in ms, comma-separated")
    parser.add_argument("--sequences", type=INTEGERS, default="16,64,384", help="real: sequences per core")
    parser.add_argument("--lengths", help="force the answers' lengths: thinking@MEAN, MEAN:CV, FILE.json of groups")
    parser.add_argument("--accuracy", type=float, help="real: report the time until this accuracy")
    parser.add_argument("--eval-every", type=int, default=5, help="steps between evaluations, with --accuracy")
    parser.add_argument("--bounds", type=INTEGERS, default="1,2,4,8", help="values of max_staleness")
    parser.add_argument("--seeds", type=INTEGERS, default="1,2,3")
    parser.add_argument("--no-plan", action="store_true", help="leave out the planner's split")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps; writes nothing")
    add_options(parser)
    return parse_job(parser)


class Runner:
    """Runs contenders one after another, in turn within a seed."""

    def __init__(
        self, config: str, overrides: Sequence[str], runs_dir: Path, accuracy: float | None, measured: Measured
    ) -> None:
        self._config, self._overrides, self._runs_dir, self._accuracy = config, list(overrides), runs_dir, accuracy
        self._measured = measured
        self.tried: Row = {}
        """Samples/s of each candidate of the most recent baseline, or the reason why it cannot run."""

    def compare(
        self, place: Emulated | Real | Own, seeds: Sequence[int], bounds: Sequence[int], *, is_planning: bool
    ) -> list[Row]:
        """Run every contender on every seed, the tuned baseline first."""
        print(f"\n{place.label}", flush=True)
        baseline = self._tuned(place, seeds[0])
        planned = None
        if is_planning and isinstance(place, Emulated):
            planned = place.planned(self._config, self._overrides)
        contenders = [Contender("sync", "sync", baseline.overrides), *place.contenders(bounds, planned)]
        rows = []
        window = self._window(contenders)
        for seed in seeds:
            alone = [self._run(each, seed, steps) for each, steps in place.alone()] if isinstance(place, Real) else []
            for contender in contenders:
                row = {"place": place.label, "name": contender.name, "seed": seed, "tuned": baseline.name,
                       **self._run(contender, seed, self._steps(contender), window=window)}  # fmt: skip
                if isinstance(place, Real) and contender.mode != "sync":
                    row |= place.bound(*alone, row)
                rows.append(row)
                tell(row)
        return rows

    def _steps(self, contender: Contender) -> str:
        """Override of the number of steps. As many are added as the contender runs ahead: during the last ones nothing
        is left to generate."""
        config = self._loaded(contender)
        return f"num_steps={config.num_steps + (config.staleness.bound or 0)}"

    def _window(self, contenders: Sequence[Contender]) -> tuple[int, int]:
        """The steps that are counted for all contenders: those that count for the one that runs furthest ahead.

        Raises UserError if there are none.
        """
        configs = list(map(self._loaded, contenders))
        num_steps, ahead = configs[0].num_steps, max(config.staleness.bound or 0 for config in configs)
        first, last = window_of(num_steps, ahead)
        if last - first < FEWEST_COUNTED:
            raise UserError(
                f"of {num_steps} steps {max(0, last - first)} would count: at max_staleness {ahead} the first {first} "
                "take samples that were ready before",
                where="num_steps",
                remedy=f"give num_steps={first + FEWEST_COUNTED} or more, or lower --bounds",
            )
        return first, last

    def _loaded(self, contender: Contender) -> RunConfig:
        return load_config(self._config, [*contender.overrides, *self._overrides]).config

    def _tuned(self, place: Emulated | Real | Own, seed: int) -> Contender:
        """The fastest of the baseline's candidates over six steps. For a user's job, a candidate that cannot run is
        left out (for instance, the model does not fit one GPU). Otherwise all candidates can run, and a failure ends
        the benchmark instead of choosing a slower baseline.

        Raises SystemExit if none can run.
        """
        rates: dict[str, float] = {}
        self.tried = {}
        candidates = {candidate.name: candidate for candidate in place.baselines()}
        for name, candidate in candidates.items():
            try:
                rates[name] = self._run(candidate, seed, "num_steps=6")["samples_per_s"]
                self.tried[name] = rates[name]
                print(f"  tuning {name}: {rates[name]:.2f} samples/s", flush=True)
            except JobFailed as error:
                if not isinstance(place, Own):
                    raise
                self.tried[name] = error.reason
                print(f"  tuning {name}: failed, left out: {error.reason}", flush=True)
        if not rates:
            raise SystemExit(f"{place.label}: every candidate of the synchronous baseline failed.")
        return candidates[max(rates, key=lambda name: rates[name])]

    def _run(self, contender: Contender, seed: int, *more: str, window: tuple[int, int] | None = None) -> Row:
        overrides = [f"seed={seed}", *contender.overrides, *self._overrides, *more]

        def measure() -> Row:
            folder = Path(train(self._config, overrides, self._runs_dir)["folder"])
            row = figures(folder, window)
            refuse_distorted(row, folder)
            row["time_to_s"] = time_to(folder, self._accuracy) if self._accuracy is not None else None
            by_token = alone(folder) if contender.name == "alone" else {}
            return {"folder": folder.name, **{key: row.get(key) for key in KEPT}, **by_token}

        return self._measured.row([self._config, self._accuracy, window, *overrides], measure)


def tell(row: Row) -> None:
    """Print one finished run."""
    keys = ("samples_per_s", "step_s", "trainer_wait", "rollout_idle", "bound_share", "late_share")
    words = [f"{key} {row[key]:.3g}" for key in keys if row[key] is not None]
    print(f"  seed {row['seed']}  {row['name']:32}" + "  ".join(words), flush=True)


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One line per place and contender: means over seeds, and the ratio to sync paired by seed with its 95 % interval.

    The ratio is that of tokens/s if devices are emulated or lengths forced: every contender gets answers of the same
    lengths, but which of them are in the counted steps is random. Otherwise it is that of samples/s.
    """
    lines = []
    for place in dict.fromkeys(row["place"] for row in rows):
        mine = [row for row in rows if row["place"] == place]
        rate = "tokens_per_s" if place.startswith(EMULATED) or FORCED in place else "samples_per_s"
        base, apart = ({row["seed"]: row[rate] for row in mine if row["name"] == name} for name in ("sync", APART))
        for name in dict.fromkeys(row["name"] for row in mine):
            own = [row for row in mine if row["name"] == name]
            mean, half = mean_interval([row[rate] / base[row["seed"]] for row in own])
            lines.append({
                "place": place, "name": name, "seeds": len(own), "ratio": mean,
                "ratio_half_width_95": half,
                "ratio_to_apart": _mean([row[rate] / apart[row["seed"]] if apart else None for row in own]),
                **{key: _mean([row[key] for row in own]) for key in KEPT},
                "bound_shares": [row["bound_share"] for row in own if row["bound_share"] is not None],
                "ratio_at_most": None if name == "sync" else _at_most(mean, _mean([row["bound_share"] for row in own])),
            })  # fmt: skip
    return lines


def _at_most(ratio: float, bound_share: float | None) -> float | None:
    """The ratio to sync if the pool with more work never waited: the limit on these devices."""
    return None if not bound_share else ratio / bound_share


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


COLUMNS = (
    ("samples/s", "samples_per_s", ",.2f"), ("tokens/s", "tokens_per_s", ",.0f"), ("step s", "step_s", ".2f"),
    ("to sync", "ratio", ".2f"), ("± 95 %", "ratio_half_width_95", ".2f"), ("at most", "ratio_at_most", ".2f"),
    ("to apart", "ratio_to_apart", ".2f"),
    ("bound", "bound_share", ".1%"), ("trainer waits", "trainer_wait", ".1%"), ("rollout idle", "rollout_idle", ".1%"),
    ("cores", "cores_used", ".2f"),
    ("staleness", "staleness_mean", ".2f"), ("to acc. s", "time_to_s", ".1f"),
)  # fmt: skip


def print_table(rows: Sequence[Row]) -> None:
    """Print the comparison."""
    lines = summarise(rows)
    for place in dict.fromkeys(line["place"] for line in lines):
        print(f"\n{place}\n{'':34}" + "".join(f"{title:>14}" for title, _, _ in COLUMNS))
        for line in (line for line in lines if line["place"] == place):
            print(f"{line['name']:34}" + "".join(f"{_cell(line[key], form):>14}" for _, key, form in COLUMNS))


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def publish_location(part: str, options: argparse.Namespace) -> Path:
    """The published results, if the same command made this part, or if they lack it and it is not about a user's job;
    otherwise a file next to the runs.
    """
    published = json.loads(RESULT.read_text())["parts"].get(part) if RESULT.is_file() else None
    return chosen("async_vs_sync", options, RESULT, published and published["command"], WHICH)


def keep(part: str, rows: Sequence[Row], path: Path, tried: Row) -> Path:
    """Write the rows to a result file, replacing earlier ones of the same part. tried: the baseline's candidates."""
    found = {"tried": tried, "rows": list(rows), "lines": summarise(rows)}
    parts = parts_with(path, part, command_of("async_vs_sync"), found)
    return write("async_vs_sync", "python -m benchmarks.async_vs_sync", {"parts": parts}, path)


def plot(source: Path, picture: Path) -> Path:
    """Draw a result file: throughput over the tuned synchronous baseline, a panel per kind of device and model."""
    kinds: dict[str, dict[str, list[Row]]] = {}
    for part, found in json.loads(source.read_text())["parts"].items():
        kind, _, setting = part.partition(", ") if "real cores" in part else part.rpartition(", ")
        kinds.setdefault(kind, {})[setting] = found["lines"]
    made, panels = pictures.figure(len(kinds))
    descriptions = []
    for panel, (kind, settings) in zip(panels, kinds.items(), strict=True):
        fullest_first = sorted(settings.values(), key=len, reverse=True)
        names = list(dict.fromkeys(_short(line["name"]) for lines in fullest_first for line in lines))
        for index, (setting, own) in enumerate(settings.items()):
            style = pictures.line_style(index) | {"markersize": 5, "linewidth": 1.4}
            places = [names.index(_short(line["name"])) for line in own]
            panel.plot(places, [line["ratio"] for line in own], label=setting, **style)
            descriptions.append(
                f"{kind}, {setting}: " + ", ".join(f"{line['name']} {line['ratio']:.2f}" for line in own)
            )
        panel.axhline(1.0, color=pictures.FAINT, linewidth=1)
        panel.set_xticks(range(len(names)), names)
        panel.set_ylim(0, 1.1 * max(line["ratio"] for own in settings.values() for line in own))
        panel.set_title(f"throughput over tuned sync: {kind}")
        panel.legend(loc="best")
    title = "Throughput over the tuned synchronous baseline"
    return pictures.save(made, picture, title=title, description="; ".join(descriptions), source=source)


def _short(name: str) -> str:
    short = {"one_step_off": "1 off", APART: "apart"}.get(name, name.replace("async ", "η "))
    return "planned" if PLANNED in name else short


if __name__ == "__main__":
    main()
