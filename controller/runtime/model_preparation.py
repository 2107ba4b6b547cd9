"""Prepares the folder of the starting model: loaded, made from a config, or warm-started; cached by its settings.

Runs `python -m trainer.prepare` as a separate process; torch is not imported.

A prepared model is a pure function of `wiring.pinned_facts` and the demonstrations' rows; equal ones are prepared once
and stored in <runs_dir>/.prepared/<digest>. The folder is created atomically by one run at a time; others that need the
same model wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like import __version__
from areal_like.errors import DeadlineExceeded, ProcessDied, UserError
from areal_like.metrics import read_jsonl
from areal_like.process import USER_MISTAKE, last_error
from controller.config.run_config import RunConfig
from controller.config.stall_limit import stall_limit_s
from controller.data.table import Table, load_demonstrations
from controller.launch.environments import child_environment
from controller.launch.launcher import Launcher, tail_of
from controller.run_folder.formatting import number
from controller.run_folder.run_folder import RunFolder
from controller.telemetry.display import Display
from controller.telemetry.progress import Progress
from controller.telemetry.pulse import ProcessNow
from controller.wiring.process_specs import PREPARATION, PrepareSpec, pinned_facts, prepare_spec

POLL_S = 0.2


@dataclass(frozen=True)
class Prepared:
    """The starting model's folder, and the duration of its preparation."""

    model_dir: Path
    wall_s: float
    was_cached: bool


def needs_preparation(config: RunConfig) -> bool:
    """Return whether the model must be prepared: False if model.path is a folder on this machine that is used
    directly.
    """
    is_plain = config.model.path is not None and config.model.tokenizer == "from_model" and config.warm_start is None
    return not (is_plain and _plain_folder(config).is_dir())


def prepared_before(config: RunConfig) -> Path | None:
    """The folder of the starting model if an earlier run has prepared it. Raises UserError (demonstrations)."""
    target = _cache_folder(config, load_demonstrations(config))
    return target if _is_there(target) else None


async def prepare(
    config: RunConfig,
    folder: RunFolder,
    launcher: Launcher,
    display: Display,
    *,
    publish_to: Path | None = None,
    out_dir: Path | None = None,
) -> Prepared:
    """Prepare the starting model, or find it in the cache.

    out_dir: write it to this folder instead of the cache. publish_to: also publish it as version 0 in this weight
    store. Raises UserError (reported by the preparation), ProcessDied, DeadlineExceeded (no more progress).
    """
    started_s = time.monotonic()
    if publish_to is None and out_dir is None and not needs_preparation(config):
        return Prepared(_plain_folder(config), 0.0, was_cached=True)
    demonstrations = load_demonstrations(config)
    target = out_dir or _cache_folder(config, demonstrations)
    is_cached = publish_to is None and out_dir is None
    async with _turn(target, display) if is_cached else contextlib.nullcontext():
        if is_cached and _is_there(target):
            display.note(f"starting model: {target} (already prepared)")
            return Prepared(target, 0.0, was_cached=True)
        spec = _specify(config, folder, demonstrations, target, publish_to)
        try:
            await _make(config, launcher, display, spec, folder.processes / "prepare.json")
        except UserError:
            if not (is_cached and _is_there(target)):  # completed by another run on a file system without locks
                raise
    return Prepared(target, time.monotonic() - started_s, was_cached=False)


def _specify(
    config: RunConfig, folder: RunFolder, demonstrations: Table | None, target: Path, publish_to: Path | None
) -> PrepareSpec:
    """Spec of the process; the demonstrations are written next to it."""
    rows_path = None
    if demonstrations is not None:
        rows_path = folder.processes / "demonstrations.jsonl"
        write_rows(demonstrations, rows_path)
    status_path = folder.logs / "prepare.status.jsonl"
    status_path.unlink(missing_ok=True)  # an earlier session of the run may have been stopped during its preparation
    return prepare_spec(config, out_dir=target, sft_rows=rows_path, status_path=status_path, publish_to=publish_to)


async def _make(config: RunConfig, launcher: Launcher, display: Display, spec: PrepareSpec, spec_path: Path) -> None:
    spec.save(spec_path)
    display.note("preparing the starting model" + (" (supervised warm start)" if spec.sft_rows else ""))
    try:
        environment = child_environment(spec.num_threads, user_path=launcher.user_path)
        await launcher.start("prepare", ["-m", PREPARATION, "--spec", str(spec_path)], environment)
        await _follow(launcher, display, Path(str(spec.status_path)), stall_limit_s(config))
    finally:
        if spec.sft_rows is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(spec.sft_rows)


@contextlib.asynccontextmanager
async def _turn(target: Path, display: Display) -> AsyncIterator[None]:
    """Wait until no other run prepares `target`; the lock of a killed run is released.

    If locks are not available (a file system without locks, a folder that cannot be written), there is no wait: of two
    results the second is discarded, and the process reports problems of the folder.
    """
    lock, is_reported = None, False
    try:
        with contextlib.suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(target.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o644)
        while lock is not None and _is_taken(lock):
            if not is_reported:
                display.note("another run is preparing the same starting model; waiting for this run")
                is_reported = True
            await asyncio.sleep(POLL_S)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _is_taken(lock: int) -> bool:
    """Try to lock it; return whether another process has the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def prepare_process(launcher: Launcher) -> dict[str, Any]:
    """The preparation process for status.json; empty if none runs."""
    if not launcher.is_running("prepare"):
        return {}
    return {
        "prepare": ProcessNow(
            "prepare", "prepare", launcher.pid_of("prepare"), rss_mb=launcher.rss_mb_of("prepare")
        ).row()
    }


def _is_there(target: Path) -> bool:
    return (target / "config.json").is_file()


def _plain_folder(config: RunConfig) -> Path:
    return Path(str(config.model.path)).expanduser().resolve()


async def _follow(launcher: Launcher, display: Display, status_path: Path, stall_after_s: float) -> None:
    """Show progress until the process has exited; raise an error if it failed."""
    num_shown = 0
    life = _Life(stall_after_s)
    while True:
        ended = next((end for end in launcher.reap() if end.name == "prepare"), None)
        rows = await asyncio.to_thread(read_jsonl, status_path)
        for row in rows[num_shown:]:
            display.progress(_progress(row))
        num_shown = len(rows)
        if ended is None:
            life.look(launcher.cpu_s_of("prepare"))
            await asyncio.sleep(POLL_S)
            continue
        if ended.returncode == 0:
            return
        tail = tail_of(launcher.log_of("prepare"))
        if ended.returncode == USER_MISTAKE:
            raise UserError(last_error(tail) or "the model cannot be prepared")
        raise ProcessDied("prepare", ended.returncode, tail)


class _Life:
    """Checks whether a process still makes progress: computing, loading and downloading all use processor time."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._spent_s, self._moved_s = -1.0, time.monotonic()

    def look(self, cpu_s: float | None) -> None:
        """Check the process. `cpu_s`: its processor time so far, if known. Raises DeadlineExceeded."""
        if cpu_s is not None and cpu_s != self._spent_s:
            self._spent_s, self._moved_s = cpu_s, time.monotonic()
        if time.monotonic() - self._moved_s > self._patience_s:
            raise DeadlineExceeded("the starting model", "process `prepare`, which made no progress", self._patience_s)


def _progress(row: Mapping[str, Any]) -> Progress:
    """Progress from a row of the preparation's status file (written by trainer/prepare_progress.py)."""
    if "num_bytes" in row:
        done, total = row["num_bytes"], row["total_bytes"]
        return Progress("download", done, total, _left_s(row, done, total), is_bytes=True)
    done, total = row["step"], row["num_steps"]
    left_s = _left_s(row, done, total) if done > 1 else None  # the first step takes many times as long as the others
    return Progress("warm start", done, total, left_s, note=f"loss {number(row['loss'], 4)}")


def _left_s(row: Mapping[str, Any], done: int, total: int | None) -> float | None:
    """Estimated seconds to the end."""
    return row["seconds"] * (total - done) / done if total and done else None


def _cache_folder(config: RunConfig, demonstrations: Table | None) -> Path:
    facts = {
        **pinned_facts(config),
        "rows": demonstrations.fingerprint if demonstrations else None,
        "code": __version__,
    }
    if path := config.model.path:
        with contextlib.suppress(OSError):
            entries = Path(path).expanduser().iterdir()
            facts["folder"] = sorted((entry.name, entry.stat().st_mtime_ns) for entry in entries)
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    return (_cache_root(Path(config.runs_dir).expanduser()) / digest).resolve()


def _cache_root(runs_dir: Path) -> Path:
    """The folder of prepared models; a separate one if another user of the same runs_dir has created it first."""
    root = runs_dir / ".prepared"
    is_others = root.exists() and root.stat().st_uid != os.getuid()
    return runs_dir / f".prepared-{os.getuid()}" if is_others else root


def write_rows(rows: Table, path: Path) -> None:
    """Write rows as JSONL, atomically."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    os.replace(fresh, path)
