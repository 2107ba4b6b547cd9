"""How many verdicts a second does the reward service give, and what does a sandbox cost?

    python -m benchmarks.reward --code             about 90 seconds
    python -m benchmarks.reward --code --quick     about 20 seconds

`throughput`: programs a second through the service's desk and pool with as many scoring processes as cores, at a steady
state, for three kinds of rows: functions with asserts, whole programs with two inputs, and the published references of
HumanEval and MBPP where they are found (folder AREAL_LIKE_TEST_DATA, else `shared/data` beside the checkout); half of
the programs are wrong. `overhead`: on one core, one program after the other, alternating: the scorer on a small program
against a bare `python -I` (and `-I -S`) with the same program and asserts in one file; medians and their difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from areal_like.messages import ScoreRequest
from areal_like.verdict import Verdict
from benchmarks.runs import write
from services.config import CodeOptions, RewardSettings
from services.reward.desk import Desk, Entry
from services.reward.pool import Pool
from services.reward.scorers.port import ScorerInput
from services.reward.scorers.programs import CodeScorer

ADD_TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(10, 20) == 30"]
ADD, WRONG_ADD = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"
SUM_TESTS = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 20\n", "output": "30\n"}]
SUM, WRONG_SUM = "print(sum(map(int, input().split())))\n", "print(7)\n"
DATA = Path(os.environ.get("AREAL_LIKE_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))

Work = list[tuple[dict[str, Any], str]]


def published() -> Work:
    """References of HumanEval and MBPP, every second one broken; empty where the files are not found."""
    work: Work = []
    for name, column in (("humaneval.jsonl", "canonical_solution"), ("mbpp_nontest.jsonl", "code")):
        file = DATA / "code" / name
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
        work += [(row, row[column].replace("return", "return 7 or", number % 2)) for number, row in enumerate(rows)]
    return work


async def programs_per_s(work: Work, num_workers: int, seconds: float) -> dict[str, float]:
    """Score for so long, with a queue that is never empty, after a warm-up of a tenth."""
    settings = RewardSettings.model_validate(
        {"scorers": [{"kind": "code"}], "num_workers": num_workers, "num_spares": 0, "retries": 0, "max_queue": 16}
    )
    pool = Pool(settings)
    await pool.start()
    desk = Desk(pool, settings, lambda peer, reply: True)
    ends: list[float] = []
    kinds: list[str] = []

    def on_scored(entry: Entry, verdict: Verdict, began_s: float) -> None:
        ends.append(time.monotonic())
        kinds.append(verdict.kind)

    async def feed() -> None:
        for number, (row, response) in enumerate(cycle(work)):
            request = ScoreRequest(
                request_id=str(number), scorer="", row=row, response=response, finish_reason="stop", num_tokens=1,
                deadline_s=60.0,
            )  # fmt: skip
            await desk.take("benchmark", request)

    tasks = [asyncio.create_task(pool.run()), *(asyncio.create_task(desk.work(on_scored)) for _ in range(num_workers))]
    while pool.num_ready < num_workers:  # noqa: ASYNC110  (a benchmark's start-up)
        await asyncio.sleep(0.05)
    tasks.append(asyncio.create_task(feed()))
    began_s = time.monotonic() + 0.1 * seconds
    await asyncio.sleep(1.1 * seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pool.close()
    counted = [end for end in ends if end >= began_s]
    return {
        "programs_per_s": len(counted) / (counted[-1] - began_s),
        "programs": len(counted),
        "not_scored": sum(kind != "scored" for kind in kinds),
    }


def overhead(num_rounds: int) -> dict[str, float]:
    """Milliseconds on one core; medians."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    scorer = CodeScorer(CodeOptions())
    row, stream_row = {"program": ADD, "tests": ADD_TESTS}, {"program": SUM, "tests": SUM_TESTS[:1]}
    python = getattr(sys, "_base_executable", sys.executable)

    def score(row: dict[str, Any]) -> None:
        sample = ScorerInput(row=row, response="", finish_reason="stop", num_tokens=1)
        assert scorer.score(sample)["value"] == 1.0

    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write("\n".join([ADD, *ADD_TESTS]))
        file.flush()

        def bare(*flags: str) -> None:
            subprocess.run([python, *flags, file.name], check=True)

        sides: dict[str, Callable[[], None]] = {
            "bare_python_I_ms": lambda: bare("-I"),
            "bare_python_I_S_ms": lambda: bare("-I", "-S"),
            "asserts_ms": lambda: score(row),
            "streams_ms": lambda: score(stream_row),
        }
        spent: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(num_rounds):
            for name, run in sides.items():
                started_s = time.perf_counter()
                run()
                spent[name].append(1000 * (time.perf_counter() - started_s))
    medians = {name: statistics.median(times[2:]) for name, times in spent.items()}
    for kind in ("asserts", "streams"):
        medians[f"{kind}_beside_python_I_ms"] = medians[f"{kind}_ms"] - medians["bare_python_I_ms"]
        medians[f"{kind}_beside_python_I_S_ms"] = medians[f"{kind}_ms"] - medians["bare_python_I_S_ms"]
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", action="store_true", required=True, help="the scorer `code`")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    seconds, num_rounds = (4.0, 20) if options.quick else (20.0, 100)
    kinds: dict[str, Work] = {
        "asserts": [({"tests": ADD_TESTS}, ADD), ({"tests": ADD_TESTS}, WRONG_ADD)],
        "streams": [({"tests": SUM_TESTS}, SUM), ({"tests": SUM_TESTS}, WRONG_SUM)],
        "published": published(),
    }
    results: dict[str, Any] = {"workers": options.workers, "throughput": {}}
    for kind, work in kinds.items():
        if not work:
            print(f"{kind}: skipped, no files in {DATA / 'code'}")
            continue
        told = asyncio.run(programs_per_s(list(islice(cycle(work), max(len(work), 2))), options.workers, seconds))
        results["throughput"][kind] = told
        print(f"{kind:10} {told['programs_per_s']:7.1f} programs/s   {told['not_scored']} without a score", flush=True)
    results["overhead"] = overhead(num_rounds)
    for name, value in results["overhead"].items():
        print(f"{name:32} {value:7.1f}")
    if not options.quick:
        write("reward_code", "python -m benchmarks.reward --code", results)


if __name__ == "__main__":
    main()
