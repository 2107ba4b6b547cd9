"""How does TRL compare on a laptop? GRPOTrainer and this project on the same job, to the same accuracy.

    python -m benchmarks.peer_trl --build          make .venv-trl from benchmarks/peers/trl.lock; a few minutes
    python -m benchmarks.peer_trl                  both sides tuned, 5 seeds: about an hour on two cores
    python -m benchmarks.peer_trl --quick          one seed, no tuning: about 12 minutes; writes nothing

Same tiny model (the quickstart's warm start, one per seed), prompts, reward, group size, batch, token limit and cores.
Ours is `mode: async` with the settings below. TRL runs in its own environment, with both cores for every phase; the
time of its evaluations is not counted, the time of ours is. TRL is first tuned for speed: several micro-batches, and
continuous batching (configured as in benchmarks/engine.py) instead of `generate`. Then both are tuned on a seed that is
not counted: over the same learning rates, and at the best of them with two updates per batch instead of one (then TRL
also with two-sided clipping). Ours, which like TRL's is ordinary PPO, but with dual clip, is also tried with the
decoupled loss, with a staleness bound of 1 instead of 2, and without dual clip. The best two settings of each side are
tried on a second seed that is not counted; the better one over both seeds is used. The time starts with the first
step's generation. The accuracy is greedy, on the same held-out prompts, measured every five batches and interpolated
linearly between; a run ends when it is reached, and a run that never reaches it has no time and is listed. samples/s:
from that start until the accuracy is reached.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areal_like.tasks import running_sum
from benchmarks.folders import REPOSITORY
from benchmarks.measured import INTEGERS, TEXTS, Measured, add_options
from benchmarks.publishing import result_path
from benchmarks.runs import command_of, environment, train, write
from benchmarks.spreads import mean_interval
from benchmarks.steady import crossing, curve_of, rate_until
from benchmarks.tables.form import ratio_words
from controller.wiring.process_specs import num_cores

VENV = REPOSITORY / ".venv-trl"
LOCK = REPOSITORY / "benchmarks" / "peers" / "trl.lock"
SIDE = REPOSITORY / "benchmarks" / "peers" / "trl_side.py"
CONFIG = REPOSITORY / "configs" / "quickstart.yaml"
GROUPS, GROUP_SIZE, MAX_NEW = 48, 8, 100
EVAL_EVERY, EVAL_ROWS = 5, 200
RATES = ("2e-4", "4e-4", "8e-4")
MICRO_BATCHES = (32, 64, 192)
"""Sequences of TRL's forward and backward passes; it generates a whole batch at once."""
BATCHING = {
    "max_requests_per_batch": 128, "page_size": 32, "num_blocks": 128 * 5, "max_batch_tokens": 128 * 32,
    "use_cuda_graph": False, "use_async_batching": False,
}  # fmt: skip
"""TRL's continuous batching: as many concurrent answers as in our engine, with pages for 160 tokens each."""
SPEED_STEPS = 4
LOSSES = {"recompute": (), "behaviour": ("trainer.loss.proximal=behaviour", "trainer.loss.weight.mode=off")}
LONGEST_S = 3600
"""Time limit of one TRL run."""
TUNING_SEEDS = (1000, 1001)
NUM_FINALISTS = 2
Settings = dict[str, Any]
"""`lr`, `mini_batches` (updates a batch), our `proximal`, `dual_clip` and `max_staleness` (else the config's), TRL's
`micro_batch`, `is_continuous` and `delta` (its dual clip)."""
PLAIN: dict[str, Settings] = {
    "ours": {"mini_batches": 1, "proximal": "behaviour", "dual_clip": 3},
    "trl": {"mini_batches": 1, "micro_batch": 64, "is_continuous": False},
}
VARIED: dict[str, tuple[Settings, ...]] = {
    "ours": ({"mini_batches": 2}, {"proximal": "recompute"}, {"max_staleness": 1}, {"dual_clip": "null"}),
    "trl": ({"mini_batches": 2}, {"mini_batches": 2, "delta": 3.0}),
}
"""Settings tried at the best learning rate. With one update per batch, TRL's policy is the one that sampled, and
nothing is clipped."""
SIDES = tuple(PLAIN)
SOURCES = (str(CONFIG), str(SIDE), str(LOCK))
"""Files that define both sides, in addition to this one."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--index", default="", help="package index from which --build installs torch")
    parser.add_argument("--accuracy", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=60, help="largest number of steps")
    parser.add_argument("--seeds", type=INTEGERS, default="1,2,3,4,5")
    parser.add_argument("--rates", type=TEXTS, default=",".join(RATES), help="learning rates tried for both sides")
    parser.add_argument("--quick", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    if options.build:
        build(options.index)
        return
    if not (VENV / "bin" / "python").is_file():
        raise SystemExit("TRL's environment does not exist: run python -m benchmarks.peer_trl --build")
    seeds = [1] if options.quick else options.seeds
    rates = options.rates
    options.runs_dir.mkdir(parents=True, exist_ok=True)
    measured = Measured.of("peer_trl", options)
    contest = Contest(options.accuracy, options.steps, options.runs_dir.resolve(), measured)
    tuned = {side: {**PLAIN[side], "lr": rates[0]} if options.quick else contest.tuned(side, rates) for side in SIDES}
    rows = [contest.run(side, seed, tuned[side]) for seed in seeds for side in SIDES]
    result = {
        "accuracy": options.accuracy, "tuned": tuned, "tried": contest.tried, "versions": versions(), "rows": rows,
        **compare(rows),
    }  # fmt: skip
    print_table(result)
    if not options.quick:
        print(f"written to {write('peer_trl', command_of('peer_trl'), result, result_path('peer_trl', options))}")
    measured.finish()


def build(index: str) -> None:
    """Build TRL's environment from its lock file."""
    venv.create(VENV, with_pip=True, clear=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = next(line for line in LOCK.read_text().splitlines() if line.startswith("torch=="))
    subprocess.run([*pip, torch, *(["--index-url", index] if index else [])], check=True)
    subprocess.run([*pip, "-r", str(LOCK)], check=True)
    print(f"made {VENV}: {versions()}")


def versions() -> dict[str, str]:
    """Package versions in TRL's environment."""
    code = "import json, trl, torch, transformers as t; print(json.dumps(dict(trl=trl.__version__, torch=torch.__version__, transformers=t.__version__)))"  # noqa: E501
    done = subprocess.run([str(VENV / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


class Contest:
    """Runs both sides from the same initial model."""

    def __init__(self, accuracy: float, steps: int, runs_dir: Path, measured: Measured) -> None:
        self._accuracy, self._steps, self._runs_dir, self._measured = accuracy, steps, runs_dir, measured
        self.tried: list[Row] = []
        """Settings and results of the tuning."""

    def tuned(self, side: str, rates: Sequence[str]) -> Settings:
        """The settings that reached the accuracy first (or were most accurate) on the tuning seeds."""
        plain = self._quickest() if side == "trl" else PLAIN[side]
        found = [self._try(side, {**plain, "lr": rate}) for rate in rates]
        found += [self._try(side, {**min(found, key=_soonest)["settings"], **other}) for other in VARIED[side]]
        finalists = sorted(found, key=_soonest)[:NUM_FINALISTS]
        more = [[row, *(self._try(side, row["settings"], seed) for seed in TUNING_SEEDS[1:])] for row in finalists]
        best: Settings = min(more, key=_soonest_of)[0]["settings"]
        return best

    def _try(self, side: str, settings: Settings, seed: int = TUNING_SEEDS[0]) -> Row:
        self.tried.append(self.run(side, seed, settings))
        return self.tried[-1]

    def _quickest(self) -> Settings:
        """TRL's settings with the most samples per second over a few batches."""
        found = [self._speed({**PLAIN["trl"], "micro_batch": size}) for size in MICRO_BATCHES]
        found.append(self._speed({**max(found, key=_rate)["settings"], "is_continuous": True}))
        self.tried += found
        best: Settings = max(found, key=_rate)["settings"]
        return best

    def _speed(self, settings: Settings) -> Row:
        job = {**settings, "lr": RATES[0]}
        measure = partial(self._trl, TUNING_SEEDS[0], job, SPEED_STEPS)
        row = self._measured.row(["speed", _words(job), *SOURCES], measure)
        failed = row.get("failed")
        rate = f"failed: {failed.splitlines()[-1]}" if failed else f"{row['samples_per_s']:.0f} samples/s"
        print(f"trl   {_words(settings)}: {rate}", flush=True)
        return {"side": "trl", "seed": TUNING_SEEDS[0], "settings": settings, **row}

    def run(self, side: str, seed: int, settings: Settings) -> Row:
        """Run one side once. Raises SystemExit if it fails."""
        key = [side, seed, _words(settings), self._accuracy, self._steps, *SOURCES]
        row = self._measured.row(key, partial(self._whole, side, seed, settings))
        shown = "never" if row["time_to_s"] is None else f"{row['time_to_s']:.0f} s"
        print(f"{side:5} seed {seed} {_words(settings)}: {self._accuracy:.0%} after {shown}, "
              f"{row['samples_per_s']:.0f} samples/s, best {row['best']:.3f}", flush=True)  # fmt: skip
        return {"side": side, "seed": seed, "settings": settings, **row}

    def _whole(self, side: str, seed: int, settings: Settings) -> Row:
        row = self._ours(seed, settings) if side == "ours" else self._trl(seed, settings)
        if "failed" in row:
            raise SystemExit(f"TRL's side failed:\n{row['failed']}")
        return row

    def _model(self, seed: int) -> Path:
        """The folder with the warm start of a seed; made once."""
        folder = self._runs_dir / f"peer-trl-start-{seed}"
        if not (folder / "config.json").is_file():
            command = [sys.executable, "-P", "-m", "controller", "sft", str(CONFIG), f"seed={seed}", f"out={folder}",
                       f"runs_dir={self._runs_dir}"]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
            if done.returncode != 0:
                raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return folder

    def _ours(self, seed: int, settings: Settings) -> Row:
        overrides = [
            f"seed={seed}", f"model.path={self._model(seed)}", "model.init=null", "model.tokenizer=from_model",
            "warm_start=null", f"num_steps={self._steps}", f"groups_per_step={GROUPS}", f"group_size={GROUP_SIZE}",
            f"trainer.optimizer.lr={settings['lr']}", "trainer.optimizer.schedule=constant",
            f"trainer.mini_batches={settings['mini_batches']}", *LOSSES[settings["proximal"]],
            f"trainer.loss.dual_clip={settings['dual_clip']}",
            *([f"staleness.max_staleness={settings['max_staleness']}"] if "max_staleness" in settings else []),
            f"data.eval.limit={EVAL_ROWS}",
            f"eval.every_steps={EVAL_EVERY}", f"eval.num_prompts={EVAL_ROWS}", "eval.at_start=false",
            "metrics.report=false",
        ]  # fmt: skip
        summary = train(str(CONFIG), overrides, self._runs_dir, is_enough=partial(has_reached, accuracy=self._accuracy))
        folder = Path(summary["folder"])
        curve = curve_of(folder)
        reached_s = crossing(curve, self._accuracy)
        return {
            "time_to_s": reached_s, "samples_per_s": rate_until(folder, reached_s),
            "best": max(reached for _, _, reached in curve), "folder": folder.name, "evals": curve,
        }  # fmt: skip

    def _trl(self, seed: int, settings: Settings, num_batches: int = 0) -> Row:
        """Run TRL. num_batches: number of batches without evaluations, to measure its speed; 0: a complete run."""
        num_batches, every = (num_batches, num_batches) if num_batches else (self._steps, EVAL_EVERY)
        model, updates = self._model(seed), settings["mini_batches"]
        train_rows = running_sum.rows(seed, "train", limit=GROUPS * num_batches)
        eval_rows = running_sum.rows(seed, "eval", limit=EVAL_ROWS)
        with tempfile.TemporaryDirectory(prefix="peer-trl-") as out:
            job = {
                "model": str(model), "out": out, "seed": seed, "lr": float(settings["lr"]),
                "num_batches": num_batches, "batch_samples": GROUPS * GROUP_SIZE, "mini_batches": updates,
                "group_size": GROUP_SIZE, "micro_batch": settings["micro_batch"],
                "delta": settings.get("delta"),
                "batching": BATCHING if settings["is_continuous"] else None,
                "max_new_tokens": MAX_NEW, "threads": num_cores(), "accuracy": self._accuracy,
                "eval_every": every, "train_rows": _rows(train_rows),
                "eval_rows": _rows(eval_rows),
            }  # fmt: skip
            spec = Path(out) / "spec.json"
            spec.write_text(json.dumps(job))
            quiet = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
            command = [str(VENV / "bin" / "python"), "-P", str(SIDE), str(spec)]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, env=quiet, check=False, timeout=LONGEST_S
                )
            except subprocess.TimeoutExpired:
                return {"failed": f"it did not end within {LONGEST_S} s"}
        seen = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"batch"')]
        if done.returncode != 0 or not seen:
            return {"failed": (done.stderr or done.stdout).strip()[-2000:]}
        curve = [(one["batch"], one["train_s"], one["accuracy"]) for one in seen]
        reached_s = crossing(curve, self._accuracy)
        return {
            "time_to_s": reached_s, "samples_per_s": seen[-1]["samples_per_s"],
            "best": max(one["accuracy"] for one in seen), "batches": seen[-1]["batch"], "evals": curve,
        }  # fmt: skip


def has_reached(folder: Path, accuracy: float) -> bool:
    """Whether a running job has reached this accuracy in an evaluation; its last line may be incomplete."""
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
    rows = (json.loads(line) for line in whole if line.endswith("\n") and '"kind":"eval"' in line)
    return any((row["accuracy"] or 0.0) >= accuracy for row in rows)


def _soonest_of(rows: Sequence[Row]) -> tuple[float, float]:
    times, lacks = zip(*map(_soonest, rows), strict=True)
    return sum(times), sum(lacks)


def _soonest(row: Row) -> tuple[float, float]:
    return (row["time_to_s"] or math.inf, -row["best"])


def _rate(row: Row) -> float:
    rate: float = row.get("samples_per_s", 0.0)
    return rate


def _words(settings: Settings) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def _rows(rows: Iterable[Row]) -> list[dict[str, str]]:
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]


def compare(rows: Sequence[Row]) -> dict[str, Any]:
    """Ratios paired by seed: TRL's time over ours, our samples/s over TRL's. Runs that never reached the accuracy are
    listed."""
    by = {(row["side"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    both = [s for s in seeds if by["ours", s]["time_to_s"] and by["trl", s]["time_to_s"]]
    times = [by["trl", s]["time_to_s"] / by["ours", s]["time_to_s"] for s in both]
    speeds = [by["ours", s]["samples_per_s"] / by["trl", s]["samples_per_s"] for s in seeds]
    return {
        "time_ratio": _ratio(times), "samples_ratio": _ratio(speeds),
        "never": [{"side": row["side"], "seed": row["seed"]} for row in rows if row["time_to_s"] is None],
    }  # fmt: skip


def _ratio(pairs: Sequence[float]) -> Row | None:
    """Geometric mean with its 95 % interval, computed on logarithms. None without pairs."""
    if not pairs:
        return None
    mean, half = mean_interval([math.log(pair) for pair in pairs])
    low, high = (None, None) if half is None else (math.exp(mean - half), math.exp(mean + half))
    return {"mean": math.exp(mean), "low": low, "high": high, "pairs": list(pairs)}


def print_table(result: Row) -> None:
    """Print the comparison."""
    print(f"\nto {result['accuracy']:.0%} accuracy; TRL {result['versions']['trl']}")
    for side in SIDES:
        mine = [row for row in result["rows"] if row["side"] == side]
        times = [row["time_to_s"] for row in mine if row["time_to_s"] is not None]
        reached = f"{statistics.fmean(times):.0f} s" if times else "never"
        print(f"{side:6}{reached:>10}   {statistics.fmean(row['samples_per_s'] for row in mine):8.1f} samples/s   "
              f"{_words(result['tuned'][side])}, {len(times)} of {len(mine)} seeds")  # fmt: skip
    for key, words in (("time_ratio", "TRL's time over ours"), ("samples_ratio", "our samples/s over TRL's")):
        if (found := result[key]) is not None:
            print(f"{words}: {ratio_words(found)}")


if __name__ == "__main__":
    main()
