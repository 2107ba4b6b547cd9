"""Runs a benchmark's part on several ranks, each in a separate process with one thread."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.folders import REPOSITORY
from benchmarks.runs import environment


def results_of_ranks(
    module: str, words: Callable[[int, str], Sequence[str]], num_ranks: int, *, timeout_s: float, title: str
) -> list[Any]:
    """The JSON value in the last line that each rank prints. Raises SystemExit with the output of one that fails.

    words: the arguments of `python -m module` for a rank and the file in which the ranks meet.
    """
    variables = environment() | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        started = [
            subprocess.Popen(
                [sys.executable, "-m", module, *words(rank, meeting)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, cwd=REPOSITORY, env=variables,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=timeout_s) for process in started]
        finally:
            for process in started:
                process.kill()
    for process, (out, err) in zip(started, said, strict=True):
        if process.returncode:
            raise SystemExit(f"{title}\n{out}{err}")
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def run_job_of_ranks(module: str, job: Path, num_ranks: int, *, limit_s: float) -> None:
    """Run `python -m module --job JOB --rank RANK` for each rank; the logs are next to the file of the job.

    Raises SystemExit with the ends of the logs if a rank fails.
    """
    logs = [job.with_name(f"rank-{rank}.log") for rank in range(num_ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", module, "--job", str(job), "--rank", str(rank)]
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=REPOSITORY,
                                              env=environment() | {"OMP_NUM_THREADS": "1"}))  # fmt: skip
    try:
        if any([process.wait(limit_s) for process in processes]):
            raise SystemExit("\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs))
    finally:
        for process in processes:
            process.kill()
            process.wait()
