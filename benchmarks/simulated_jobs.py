"""The jobs on this machine with which the simulator's predictions are compared, in groups.

This module runs the jobs; simulated_runs.py predicts and compares.

Real devices: the first job of a group gives the costs with which the others are predicted. Costs depend on the number
of threads, so `sync`, where engine and trainer use all cores in turn, has a separate group. In each group one job has a
batch size from which no cost was taken. Emulated devices need no costs. They run slower than in other benchmarks
(SLOWER), because the time of their own processes counts `emulation.speedup` times, which matters at a bound of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import SYNC, Emulated
from benchmarks.measured import Measured
from benchmarks.runs import train
from benchmarks.simulated_runs import compare

Row = dict[str, Any]
SLOWER = 0.6
REAL = ("data.eval=null", "eval.every_steps=0", "metrics.report=false", "num_steps=60", "groups_per_step=24")
SMALLER = "groups_per_step=12"


@dataclass(frozen=True)
class Started:
    """One job of a group."""

    name: str
    config: str
    overrides: tuple[str, ...]


def _quickstart(name: str, *overrides: str) -> Started:
    return Started(name, "configs/quickstart.yaml", (*REAL, *overrides))


def _emulated(name: str, model: str, *overrides: str, is_sync: bool = False) -> Started:
    devices = Emulated("h800", model, 8, 0.75, 3.0)
    settings = (*devices.batch(), *devices.settings(is_sync=is_sync), *(SYNC if is_sync else ("mode=async",)))
    speedup = next(float(word.partition("=")[2]) for word in settings if word.startswith("emulation.speedup="))
    slower = f"emulation.speedup={speedup * SLOWER:g}"
    return Started(name, "configs/emulated.yaml", ("metrics.report=false", *settings, slower, *overrides))


IN_TURN = (
    _quickstart("sync, seed 1", *SYNC),
    _quickstart("sync, seed 2", *SYNC, "seed=2"),
    _quickstart("sync, half the batch", *SYNC, SMALLER),
)
A_CORE_EACH = (
    _quickstart("async 2, seed 1"),
    _quickstart("async 2, seed 2", "seed=2"),
    _quickstart("async 0", "staleness.max_staleness=0"),
    _quickstart("one_step_off", "mode=one_step_off"),
    _quickstart("async 8, seed 2", "staleness.max_staleness=8", "seed=2"),
    _quickstart("async 2, half the batch", SMALLER),
)
EMULATED = (
    _emulated("1.5b, async 4", "1.5b"),
    _emulated("1.5b, async 1", "1.5b", "staleness.max_staleness=1"),
    _emulated("1.5b, sync", "1.5b", is_sync=True),
    _emulated("7b, async 4", "7b"),
)
GROUPS = (IN_TURN, A_CORE_EACH, EMULATED)


def rows(runs_dir: Path, measured: Measured, groups: Sequence[Sequence[Started]] = GROUPS) -> list[Row]:
    """Run every job and predict those that gave no costs. Raises UserError, and SystemExit if one fails."""
    found = []
    for jobs in groups:
        folders = [_folder(job, runs_dir, measured) for job in jobs]
        found += compare(folders, names=[job.name for job in jobs])
    return found


def _folder(job: Started, runs_dir: Path, measured: Measured) -> Path:
    def start() -> Row:
        return {"folder": train(job.config, job.overrides, runs_dir)["folder"]}

    folder = Path(measured.row([job.config, *job.overrides], start)["folder"])
    print(f"{job.name}: {folder}", flush=True)
    return folder
