"""Functions of benchmarks that start complete jobs: run one, read its summary, write results with machine and versions.

Also defines the common fields of a result file.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

from areal_like.guard import tied
from benchmarks import folders

LOOK_S = 1.0

"""Two-sided 95 % quantile of Student's t by degrees of freedom."""


def environment() -> dict[str, str]:
    """Environment of a process started by a benchmark, with this checkout first in PYTHONPATH."""
    inherited = os.environ.get("PYTHONPATH")
    return dict(os.environ, PYTHONPATH=os.pathsep.join([str(folders.REPOSITORY), *([inherited] if inherited else [])]))


class JobFailed(SystemExit):
    """A job ended with an error; the message has its output."""

    @property
    def reason(self) -> str:
        """The last line of the output that reports an error, otherwise the last line."""
        lines = str(self).strip().splitlines()
        said = [line for line in lines if line.startswith("error: ")]
        return (said or lines)[-1].removeprefix("error: ").strip()


def train(
    config: str,
    overrides: Sequence[str],
    runs_dir: Path,
    *,
    timeout_s: float | None = None,
    is_enough: Callable[[Path], bool] | None = None,
) -> dict[str, Any]:
    """Run one job in a separate process and return its summary.

    is_enough: called with the run's folder every second; when it returns True, the job ends after its running step.
    Raises JobFailed with its output if it fails, and subprocess.TimeoutExpired if it had to be killed.
    """
    settings = [*overrides, f"runs_dir={runs_dir}"]
    name = f"until-{uuid4().hex[:8]}"
    if is_enough is not None:  # the run's folder must be known while it runs
        settings.append(f"name={name}")
    command = [sys.executable, "-P", "-m", "controller", "train", config, *settings]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(tied(command), stdout=out, stderr=subprocess.STDOUT, env=environment())
        try:
            if is_enough is None:
                process.wait(timeout_s)
            else:
                _stop_when(process, partial(is_enough, runs_dir / name), timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        out.seek(0)
        said = out.read()
    if process.returncode != 0:
        raise JobFailed(f"{' '.join(command)}\nended with {process.returncode}:\n{said[-8000:]}")
    folder = Path(next(line for line in said.splitlines() if line.startswith("run folder: ")).split(": ", 1)[1])
    return {"folder": str(folder), **json.loads((folder / "summary.json").read_text())}


def _stop_when(process: subprocess.Popen[bytes], is_enough: Callable[[], bool], timeout_s: float | None) -> None:
    """Wait for its end; interrupt it once `is_enough` returns True. Raises subprocess.TimeoutExpired."""
    ends_s = time.monotonic() + (timeout_s or math.inf)
    while process.poll() is None and not is_enough():
        if time.monotonic() > ends_s:
            raise subprocess.TimeoutExpired(process.args, timeout_s or 0.0)
        time.sleep(LOOK_S)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.wait(None if timeout_s is None else max(ends_s - time.monotonic(), 0.01))


def machine() -> dict[str, Any]:
    """The machine and versions of a measurement."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def command_of(question: str) -> str:
    """The command that reproduces a result: as typed, without options that only locate rows and result."""
    words = [word for word in sys.argv[1:] if word not in ("--go-on", "--replace")]
    words = [word for word in words if not word.startswith("--runs-dir=")]
    while "--runs-dir" in words:
        del words[(place := words.index("--runs-dir")) : place + 2]
    return " ".join([f"python -m benchmarks.{question}", *words])


def write(name: str, command: str, result: dict[str, Any], path: Path | None = None) -> Path:
    """Write the result with date, machine and command to `path` (publishing.result_path), by default
    benchmarks/results/<name>.json.

    Also writes a page with table and plot (page.py); a published result's picture is drawn again for the documentation.
    """
    path = path or folders.RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_stamped(command, result), indent=1) + "\n")
    show(name, path)
    return path


def parts_with(path: Path, part: str, command: str, found: dict[str, Any]) -> dict[str, Any]:
    """The parts of a result file that several calls write, with this part added or replaced."""
    parts: dict[str, Any] = json.loads(path.read_text())["parts"] if path.is_file() else {}
    return {**parts, part: _stamped(command, found)}


def _stamped(command: str, result: dict[str, Any]) -> dict[str, Any]:
    return {"date": time.strftime("%Y-%m-%d"), "command": command.strip(), "machine": machine(), **result}


def show(name: str, path: Path) -> None:
    """Write the page of a result file, if the packages that draw it are installed."""
    try:
        from benchmarks.page import publish

        publish(name, path)
    except ImportError as error:
        print(f"no page next to {path}: {error.name} is not installed")
    except Exception as error:  # the measurement took hours, and its result is written
        print(f"no page next to {path}: {error!r}; to try again: python -m benchmarks.page {path}")
