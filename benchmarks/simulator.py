"""How good are the simulator's predictions? The paper's published runs, a user's own runs, and the simulator's time.

    python -m benchmarks.simulator                     the paper: fit three numbers, predict the rest; five minutes
    python -m benchmarks.simulator --parts batching            the gain of micro-batches packed by tokens in the paper
    python -m benchmarks.simulator --parts paper,batching,speed        also 1,000 steps of 512 GPUs, and 100,000 GPUs
    python -m benchmarks.simulator --parts runs        jobs of this machine, started and predicted: twenty minutes
    python -m benchmarks.simulator --runs RUN RUN ... --runs RUN RUN ...    your own runs: costs from the first of each,
                                                       the others predicted; writes nothing
    python -m benchmarks.simulator --quick             the shipped efficiencies, two counted steps a row; writes nothing

Three numbers are fitted (least squares on the logarithm of the hours) to the four synchronous rows of Table 1 of arXiv
2505.24298: the decode floor, the share of the memory bandwidth in decoding, and the time of a step that does not depend
on the model. A fourth is solved from the first of these rows: the mean of the math answers. Four numbers can fit four
rows without being right; one assumption, separate pools in synchronous runs, was also compared with an asynchronous row
(benchmarks/published.py, which has the reported figures and every assumption with its source). A fitted number at a
bound of its box (fit_box.py) is marked: it shows the bound and not a value determined by the rows.

The asynchronous rows, Table 2 (throughput by staleness), Figure 4 (scaling, relative to the fewest GPUs) and Figure 6b
(interruptible generation) are predicted, in jobs that continue for some steps after the last counted one.

Figure 6a (dynamic batching) is predicted with only the solved mean, from the evenness of the packed micro-batches
(published_batching.py); the trainer's rate above is the figure's TFLOP/s with dynamic batching.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.emulation.roofline import Efficiencies
from areal_like.errors import UserError
from benchmarks import pictures
from benchmarks import published as paper
from benchmarks.fit_box import BOX, at_bound
from benchmarks.folders import RESULTS
from benchmarks.measured import Measured, add_rows
from benchmarks.published_batching import figure_6a
from benchmarks.runs import parts_with, write
from benchmarks.simulated_jobs import rows as own_rows
from benchmarks.simulated_runs import compare, print_runs, speed
from controller.config.loading import load_config

RESULT = RESULTS / "simulator.json"
FITTED = tuple(BOX)
STARTS = np.log([[3e-3, 0.4, 30.0], [1.5e-2, 0.4, 30.0]])
"""Starting points below and above the floor that limits the smallest model: above it, the other rows do not depend on
the floor."""
LOW, HIGH = np.log(list(BOX.values())).T
STEP = 0.05
"""Step of a logarithm, for differences in place of derivatives."""
SYNC_STEPS, ASYNC_STEPS, SCALING_STEPS = 10, 40, 20
"""Numbers of steps, of which the first fifth is not counted. The fit uses the same steps as the table."""
QUICK_STEPS = 3
PARTS = ("paper", "batching", "runs", "speed")
Row = dict[str, Any]


def row_hours(row: paper.Row, reached: Efficiencies, *, eta: int | None, steps: int) -> float:
    """Predicted hours of a row of Table 1."""
    found = paper.world(row.model, row.gpus, paper.answers(row.task), reached, eta=eta, steps=steps).run()
    return found.step_s * row.steps / 3600


# ------------------------------------------------------------ the fit


def fit(steps: int, *, tell: Callable[[str], None]) -> Efficiencies:
    """Fit the efficiencies to the synchronous rows, by the smallest errors of the ratios."""

    def errors(point: np.ndarray) -> np.ndarray:
        reached = _reached(point)
        rows = [row_hours(row, reached, eta=0, steps=steps) / row.sync_h for row in paper.TABLE_1]
        tell(f"  {', '.join(f'{name} {value:.3g}' for name, value in _named(point).items())}: "
             + " ".join(f"{ratio - 1:+.1%}" for ratio in rows))  # fmt: skip
        return np.log(rows)

    ends = [least_squares(errors, start, LOW, HIGH) for start in STARTS]
    return _reached(min(ends, key=lambda end: float(np.square(errors(end)).sum())))


def fit_error(rows: Sequence[Row]) -> float:
    """Root mean square of the synchronous rows' errors, as logarithms."""
    return float(np.sqrt(np.mean([math.log1p(row["sync_error"]) ** 2 for row in rows])))


def _named(point: np.ndarray) -> dict[str, float]:
    return {name: float(f"{math.exp(value):.3g}") for name, value in zip(FITTED, point, strict=True)}


def _reached(point: np.ndarray) -> Efficiencies:
    return Efficiencies(**_named(point))


def least_squares(
    errors: Callable[[np.ndarray], np.ndarray], start: np.ndarray, low: np.ndarray, high: np.ndarray, rounds: int = 6
) -> np.ndarray:
    """Minimize the sum of squares inside the box (Levenberg-Marquardt, with differences as derivatives)."""
    point, residuals, damping = start, errors(start), 1e-2
    for _ in range(rounds):
        moves = np.diag([STEP if place + STEP <= top else -STEP for place, top in zip(point, high, strict=True)])
        slopes = np.stack([(errors(point + move) - residuals) / move.sum() for move in moves], axis=1)
        normal, gradient = slopes.T @ slopes, slopes.T @ residuals
        for _ in range(4):
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            tried = np.clip(point + change, low, high)
            found = errors(tried)
            if found @ found < residuals @ residuals:
                break
            damping *= 10
        else:
            return point
        gain = residuals @ residuals - found @ found
        point, residuals, damping = tried, found, damping / 10
        if gain < 1e-4:
            return point
    return point


# ------------------------------------------------------------ what is predicted


def table_1(reached: Efficiencies, *, sync_steps: int, async_steps: int) -> list[Row]:
    """Predicted and reported hours, and the gain of asynchrony."""
    rows = []
    for row in paper.TABLE_1:
        sync = row_hours(row, reached, eta=0, steps=sync_steps)
        asynchronous = row_hours(row, reached, eta=row.eta, steps=async_steps)
        ratio, reported = sync / asynchronous, row.sync_h / row.async_h
        rows.append({
            **asdict(row), "mean_tokens": paper.answers(row.task).mean_length(),
            "predicted_sync_h": sync, "sync_error": sync / row.sync_h - 1,
            "predicted_async_h": asynchronous, "async_error": asynchronous / row.async_h - 1,
            "predicted_ratio": ratio, "reported_ratio": reported, "ratio_error": ratio / reported - 1,
        })  # fmt: skip
    return rows


def table_2(reached: Efficiencies, etas: Sequence[int | None], *, sync_steps: int, async_steps: int) -> list[Row]:
    """Throughput by max_staleness, 1.5B on 128 GPUs."""
    rows: list[Row] = []
    lengths = paper.answers("math")
    for eta in etas:
        steps = sync_steps if eta == 0 else async_steps
        rate = paper.world("1.5b", 128, lengths, reached, eta=eta, steps=steps).run().tokens_per_s / 1e3
        base = rows[0]["predicted"] if rows else rate
        gain, reported = rate / base, paper.TABLE_2[eta] / paper.TABLE_2[0]
        rows.append({"eta": eta, "predicted": rate, "reported": paper.TABLE_2[eta], "predicted_to_sync": gain,
                     "reported_to_sync": reported, "error": gain / reported - 1})  # fmt: skip
    return rows


def figure_4(reached: Efficiencies, *, steps: int) -> list[Row]:
    """Throughput relative to the fewest GPUs of each model and context."""
    rows = []
    for (model, context), points in paper.FIGURE_4.items():
        lengths = paper.answers("math", cap=context - paper.MAX_PROMPT)
        first: tuple[float, float] | None = None
        for gpus, reported in points.items():
            world = paper.world(model, gpus, lengths, reached, eta=paper.FIGURE_4_ETA, steps=steps)
            rate = world.run().tokens_per_s / 1e3
            first = first or (rate, reported)
            gain, reported_gain = rate / first[0], reported / first[1]
            rows.append({"model": model, "context": context, "gpus": gpus, "predicted": rate, "reported": reported,
                         "predicted_gain": gain, "reported_gain": reported_gain,
                         "error": gain / reported_gain - 1})  # fmt: skip
    return rows


def figure_6b(reached: Efficiencies, *, steps: int) -> list[Row]:
    """Generated tokens per second with answers interrupted by a new version, and with workers that drain first."""
    rows = []
    for model, (with_it, without) in paper.FIGURE_6B.items():
        lengths = paper.answers("math")
        rates = {}
        for way in ("recompute", "drain"):
            gpus = paper.FIGURE_6B_GPUS
            world = paper.world(model, gpus, lengths, reached, eta=None, steps=steps, interruption=way)
            rates[way] = world.run().generated_per_s / 1e3
        gain, reported = rates["recompute"] / rates["drain"], with_it / without
        rows.append({"model": model, "predicted": rates["recompute"], "predicted_without": rates["drain"],
                     "reported": with_it, "reported_without": without, "predicted_gain": gain,
                     "reported_gain": reported, "error": gain / reported - 1})  # fmt: skip
    return rows


def predict_paper(tell: Callable[[str], None]) -> Row:
    """Fit and predict everything about the paper."""
    reached = fit(SYNC_STEPS, tell=tell)
    rows = table_1(reached, sync_steps=SYNC_STEPS, async_steps=ASYNC_STEPS)
    found: Row = {"fitted": FITTED, "efficiencies": asdict(reached), "at_bound": at_bound(asdict(reached)),
                  "fit_error": fit_error(rows), "table_1": rows}  # fmt: skip
    print(fit_line(found))
    print_table_1(rows)
    found["table_2"] = table_2(reached, tuple(paper.TABLE_2), sync_steps=SYNC_STEPS, async_steps=ASYNC_STEPS)
    found["figure_4"] = figure_4(reached, steps=SCALING_STEPS)
    found["figure_6b"] = figure_6b(reached, steps=SCALING_STEPS)
    print_others(found)
    return found


# ------------------------------------------------------------ what is shown


def fit_line(found: Row) -> str:
    """The fitted numbers as text; those at a bound are marked."""
    descriptions = [
        f"{name} {found['efficiencies'][name]:g}"
        + (" (at a bound of the fit's box)" if name in found["at_bound"] else "")
        for name in found["fitted"]
    ]
    return f"\nfitted within {found['fit_error']:.1%}: {', '.join(descriptions)}"


def print_table_1(rows: Sequence[Row]) -> None:
    """Print Table 1."""
    print(f"{'Table 1':8}{'sync h':>9}{'reported':>9}{'error':>7}{'async h':>9}{'reported':>9}{'error':>7}{'ratio':>7}"
          f"{'reported':>9}{'error':>7}")  # fmt: skip
    for row in rows:
        print(f"{row['model']:8}{row['predicted_sync_h']:9.1f}{row['sync_h']:9.1f}{row['sync_error']:+7.0%}"
              f"{row['predicted_async_h']:9.1f}{row['async_h']:9.1f}{row['async_error']:+7.0%}"
              f"{row['predicted_ratio']:7.2f}{row['reported_ratio']:9.2f}{row['ratio_error']:+7.0%}")  # fmt: skip


def print_others(found: Mapping[str, Any]) -> None:
    """Print Table 2, Figure 4 and Figure 6b."""
    for row in found["table_2"]:
        _print_gain(f"Table 2, eta {row['eta']}", row, row["predicted_to_sync"], row["reported_to_sync"])
    for row in found["figure_4"]:
        name = f"Figure 4, {row['model']}, {row['context']}, {row['gpus']} GPUs"
        _print_gain(name, row, row["predicted_gain"], row["reported_gain"])
    for row in found["figure_6b"]:
        _print_gain(f"Figure 6b, {row['model']}", row, row["predicted_gain"], row["reported_gain"])


def print_figure_6a(rows: Sequence[Row]) -> None:
    """Print Figure 6a."""
    for row in rows:
        name = f"Figure 6a, {row['model']}"
        print(f"{name:36}gain {row['predicted_gain']:.2f}, reported "
              f"{row['reported_gain']:.2f} ({row['error']:+.0%}); prompt by prompt {row['by_prompt']:.2f}")  # fmt: skip


def _print_gain(name: str, row: Row, gain: float, reported: float) -> None:
    print(f"{name:36}{row['predicted']:7.1f} k/s, reported {row['reported']:6.1f}; gain {gain:.2f}, reported "
          f"{reported:.2f} ({row['error']:+.0%})")  # fmt: skip


def keep(name: str, part: Row, command: str, path: Path = RESULT) -> Path:
    """Write a part to the result file, replacing an earlier one. command: the command that made it."""
    parts = parts_with(path, name, command, part)
    made = "; ".join(parts[name]["command"] for name in PARTS if name in parts)
    return write("simulator", made, {"parts": parts}, path)


def plot(source: Path, picture: Path) -> Path | None:
    """Draw the part about the paper: predicted and reported, one panel per table. None if it is missing."""
    found = json.loads(source.read_text())["parts"].get("paper")
    if found is None:
        return None
    made, (hours, staleness, scaling) = pictures.figure(3)
    descriptions = []
    for index, mode in enumerate(("sync", "async")):
        rows = found["table_1"]
        _pair(hours, index, mode, [row["model"] for row in rows], [row[f"predicted_{mode}_h"] for row in rows],
              [row[f"{mode}_h"] for row in rows], line="")  # fmt: skip
        descriptions += [
            f"{row['model']} {mode}: {row[f'predicted_{mode}_h']:.1f} h, {row[f'{mode}_h']:.1f}" for row in rows
        ]
    hours.set_title("hours of Table 1")
    rows = found["table_2"]
    names = ["∞" if row["eta"] is None else str(row["eta"]) for row in rows]
    _pair(staleness, 0, "1.5B", names, [row["predicted_to_sync"] for row in rows],
          [row["reported_to_sync"] for row in rows])  # fmt: skip
    staleness.set_title("throughput over sync, by staleness (Table 2)")
    for index, (model, context) in enumerate((("1.5b", 32_768), ("7b", 32_768), ("32b", 32_768))):
        rows = [row for row in found["figure_4"] if (row["model"], row["context"]) == (model, context)]
        _pair(scaling, index, model, [row["gpus"] for row in rows], [row["predicted_gain"] for row in rows],
              [row["reported_gain"] for row in rows])  # fmt: skip
    scaling.set_xscale("log", base=2)
    scaling.set_xticks([32, 64, 128, 256, 512], ["32", "64", "128", "256", "512 GPUs"])
    scaling.set_title("throughput over the fewest GPUs (Figure 4, 32k)")
    for panel, place in ((hours, "lower center"), (staleness, "lower right"), (scaling, "upper left")):
        panel.set_ylim(bottom=0)
        panel.legend(loc=place, ncols=2 if panel is hours else 1, fontsize=8)
    title = "The cluster simulator compared with published runs"
    return pictures.save(made, picture, title=title, description="; ".join(descriptions), source=source)


def _pair(
    panel: Any, index: int, name: str, xs: Sequence[Any], predicted: Sequence[float], reported: Sequence[float],
    *, line: str = "--",
) -> None:  # fmt: skip
    """Draw predicted and reported values. line: line style; empty for separate places, whose predictions get hollow
    markers."""
    colour, marker = pictures.SERIES[index], pictures.MARKERS[index]
    panel.plot(xs, reported, color=colour, marker=marker, markersize=5, linewidth=0, label=f"{name}, reported")
    panel.plot(xs, predicted, color=colour, linewidth=1.4, linestyle=line, marker="" if line else marker, markersize=8,
               markerfacecolor="none", label=f"{name}, predicted")  # fmt: skip


def checked(parts: Sequence[str], runs: Sequence[Sequence[Path]]) -> Sequence[str]:
    """The parts. Raises SystemExit if a part is unknown or a run does not exist."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise SystemExit(f"--parts: {unknown[0]!r} is none of {', '.join(PARTS)}.")
    for folder in (folder for folders in runs for folder in folders):
        if not (folder / "config.yaml").is_file():
            raise SystemExit(f"--runs: {folder} is not the folder of a run (it has no config.yaml).")
    for folders in runs:
        if len(folders) == 1 and load_config(str(folders[0])).config.emulation is None:
            raise SystemExit(f"--runs: {folders[0]} gives the costs; specify a different run to predict with them.")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="paper,batching", help="from paper, batching, runs, speed; comma-separated")
    parser.add_argument("--runs", nargs="+", action="append", default=[], type=Path, metavar="RUN")
    parser.add_argument("--quick", action="store_true")
    add_rows(parser)
    options = parser.parse_args()
    if options.quick:
        print_table_1(table_1(Efficiencies(), sync_steps=QUICK_STEPS, async_steps=QUICK_STEPS))
        print("the benchmark completed, but was not fitted and too short for meaningful figures")
        return
    chosen = checked(options.parts.split(","), options.runs)
    try:
        if options.runs:
            print_runs([row for folders in options.runs for row in compare(folders)])
        else:
            make(chosen, options)
    except UserError as error:
        raise SystemExit(str(error)) from error


def make(chosen: Sequence[str], options: argparse.Namespace) -> None:
    """Measure and write the chosen published parts. Raises UserError."""
    command = "python -m benchmarks.simulator --parts"
    if "paper" in chosen:
        keep("paper", predict_paper(lambda text: print(text, flush=True)), f"{command} paper")
    if "batching" in chosen:
        print_figure_6a(found := figure_6a())
        keep("batching", {"rows": found}, f"{command} batching")
    if "runs" in chosen:
        measured = Measured.of("simulator", options)
        print_runs(rows := own_rows(options.runs_dir, measured))
        keep("runs", {"rows": rows}, f"{command} runs")
        measured.finish()
    if "speed" in chosen:
        keep("speed", {"rows": speed()}, f"{command} speed")
    print(f"written to {RESULT}")


if __name__ == "__main__":
    main()
