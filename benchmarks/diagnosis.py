"""Is the first finding of a diagnosis right, in runs with one injected fault each and in healthy ones?

    python -m benchmarks.diagnosis                  half an hour
    python -m benchmarks.diagnosis --quick          four of them; writes nothing
    python -m benchmarks.diagnosis --only NAME,...  these; writes nothing
    python -m benchmarks.diagnosis --keep FOLDER    keeps run folders there; one that exists is only judged

Each set-up (diagnosis_set_ups.py) is a command as a user types it, with all its processes, in a separate folder. Then
the first finding of `areal-like status RUN --why --json` is read. Five results are possible:

    right         the first finding has an expected kind
    miss          a faulty run whose first finding is not an alarm (severity good or info)
    wrong cause   a faulty run whose first finding is another alarm
    false alarm   a healthy run whose first finding is an alarm, or a verdict that it must not have
    not judged    other programs used the machine so much that waits are not judged (machine_busy)

Exit status 1 if any result is not right.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areal_like.guard import tied
from benchmarks.diagnosis_set_ups import FILES, QUICK, SET_UPS, SetUp
from benchmarks.runs import command_of, environment, write
from controller.launch.forked import SHARED
from controller.wiring.preload import PRELOAD

LIMIT_S = 1800.0
"""Time limit of one command; only ends one that hangs."""
LOOK_S = 0.3
ALARMS = ("bad", "warning")


# ------------------------------------------------------------ one run


def run(set_up: SetUp, folder: Path) -> None:
    """Run the command of a set-up in a new folder."""
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    words = [set_up.command, *set_up.words, f"runs_dir={folder / 'runs'}"]
    with (folder / "output.txt").open("w") as output:
        process = _start(words, folder, output)
        try:
            _attend(set_up, process, folder)
            process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                process.kill()
        if set_up.is_resumed:
            _start(["resume", str(run_folder(folder))], folder, output).wait(LIMIT_S)


def run_folder(folder: Path) -> Path:
    """The folder of the run in a set-up's folder: its name has the suffix -eval for an evaluation."""
    evaluation = folder / "runs" / "run-eval"
    return evaluation if evaluation.exists() else folder / "runs" / "run"


def _start(words: Sequence[str], folder: Path, output: Any) -> subprocess.Popen[bytes]:
    command = tied([sys.executable, "-P", "-m", "controller", *words])
    return subprocess.Popen(
        command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )


def _attend(set_up: SetUp, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Apply the set-up's events to the run until it ends."""
    place, killed = run_folder(folder), set[int]()
    due_s = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < due_s:
        time.sleep(LOOK_S)
        if set_up.is_disk_full:
            _fill(place / "checkpoints")
        if not set_up.during or _steps(place) < set_up.at_step:
            continue
        what, _, name = set_up.during.partition(" ")
        if what in ("stop", "drain"):
            more = ["rollout-0"] if what == "drain" else []
            _start([what, str(place), *more], folder, subprocess.DEVNULL).wait(LIMIT_S)
            return
        if name == "controller":
            os.kill(int(_json(place / "state.json")["controller_pid"]), signal.SIGKILL)
            return
        _kill_new(place, name.removesuffix(" once"), killed)
        if killed and name.endswith(" once"):
            return


def _fill(path: Path) -> None:
    """Put a file in the place of a folder, so that no user can write into it."""
    if path.is_dir():
        shutil.rmtree(path)
        path.write_text("")


def _kill_new(place: Path, name: str, killed: set[int]) -> None:
    """Kill a process of the run by its name, each incarnation once."""
    rows = _json(place / "status.json").get("processes") or {}
    for known, row in rows.items():
        pid = row.get("pid")
        if known.startswith(name) and isinstance(pid, int) and pid not in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)


def _steps(place: Path) -> int:
    try:
        return sum(b'"kind":"step"' in line for line in (place / "metrics.jsonl").read_bytes().splitlines())
    except OSError:
        return 0


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ------------------------------------------------------------ what is said of it


def judge(set_up: SetUp, folder: Path) -> dict[str, Any]:
    """Get the first finding of `status --why` and whether it is right."""
    from controller.cli.main import main as areal_like

    if not run_folder(folder).exists():
        said = (folder / "output.txt").read_text().strip().splitlines()
        raise SystemExit(f"{set_up.name}: there is no run: {said[-1] if said else 'no output'}")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        areal_like(["status", str(run_folder(folder)), "--why", "--json"])
    found = json.loads(out.getvalue())
    first = found["findings"][0]
    kind = f"{first['kind']}:{first['cause']}" if first["cause"] else first["kind"]
    return {
        "set_up": set_up.name, "is_sick": set_up.is_sick, "is_unseen": set_up.is_unseen,
        "expected": list(set_up.expected), "found": kind, "severity": first["severity"], "title": first["title"],
        "others": [one["kind"] for one in found["findings"][1:]], "steps": found["step"] or 0,
        "result": result_of(set_up, kind, first["severity"]),
    }  # fmt: skip


def result_of(set_up: SetUp, kind: str, severity: str) -> str:
    """`right`, `miss`, `wrong cause`, `false alarm` or `not judged`."""
    if kind in set_up.expected:
        return "right"
    if kind == "machine_busy":
        return "not judged"
    if not set_up.is_sick:
        return "false alarm"
    return "wrong cause" if severity in ALARMS else "miss"


def counts(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Number of results by class of set-up."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        name = f"{'sick' if row['is_sick'] else 'healthy'}, {'unseen' if row['is_unseen'] else 'seen'}"
        found.setdefault(name, Counter())[row["result"]] += 1
    return {name: dict(count) for name, count in found.items()}


# ------------------------------------------------------------ all of them


def look_at_all(names: Sequence[str], root: Path, *, jobs: int) -> list[dict[str, Any]]:
    """Run `jobs` set-ups at a time and judge one after another; a run that is kept is not repeated."""
    folders = {name: root / name.replace(" ", "-") for name in names}
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_run_once, SET_UPS[name], folder) for name, folder in folders.items()]
        rows = []
        for name, one in zip(names, running, strict=True):
            one.result()
            rows.append(_row(SET_UPS[name], folders[name]))
    return rows


def _run_once(set_up: SetUp, folder: Path) -> None:
    done = folder / "done"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)  # remains of an interrupted call
        run(set_up, folder)
        done.touch()


def _row(set_up: SetUp, folder: Path) -> dict[str, Any]:
    row = judge(set_up, folder)
    print(f"{row['result']:12} {set_up.name:42} {row['found']:20} {row['title']}", flush=True)
    return row


@contextlib.contextmanager
def shared_forkserver(folder: Path) -> Iterator[None]:
    """Start one process that imports torch for all runs (decision 0031); without Linux each run imports it itself."""
    if sys.platform != "linux":
        yield
        return
    path = folder / "forkserver"
    words = ["--starter", str(os.getpid()), "--listen", str(path), *PRELOAD]
    server = subprocess.Popen([sys.executable, "-P", "-m", "areal_like.forkserver", *words], env=environment(),
                              stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    due_s = time.monotonic() + LIMIT_S
    while not path.exists() and server.poll() is None and time.monotonic() < due_s:
        time.sleep(LOOK_S)
    os.environ[SHARED] = str(path)
    try:
        yield
    finally:
        del os.environ[SHARED]
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four set-ups, and no result file")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,...", help="no result file")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs there, and repeat none that exists")
    parser.add_argument("--jobs", type=int, default=3, metavar="N", help="runs at a time (default 3)")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - set(SET_UPS):
        parser.error(f"no set-up {', '.join(sorted(unknown))}: there are {', '.join(SET_UPS)}")
    names = options.only or (QUICK if options.quick else list(SET_UPS))
    with tempfile.TemporaryDirectory(prefix="diagnosis-") as temporary:
        root = (options.keep or Path(temporary)).resolve()
        with shared_forkserver(Path(temporary)):
            rows = look_at_all(names, root, jobs=options.jobs)
    print(json.dumps(counts(rows)))
    if not options.quick and not options.only:
        write("diagnosis", command_of("diagnosis"), {"counts": counts(rows), "rows": rows})
    raise SystemExit(int(any(row["result"] != "right" for row in rows)))


if __name__ == "__main__":
    main()
