"""How many verdicts per second does the reward service give, and what does a sandbox cost?

    python -m benchmarks.reward              about 4 minutes
    python -m benchmarks.reward --quick      about 45 seconds

`throughput`: verdicts per second of the service's pool with as many scoring processes as cores, after a warm-up, with
work always waiting; median over windows of equal length, with the lowest and the highest. Kinds: `maths` (answers to
GSM8K questions in words, and expressions of MATH), `code` (functions with asserts, complete programs with two inputs,
the published references of HumanEval and MBPP); half of all answers are wrong. Data sets are read from the folder that
the environment variable AREAL_LIKE_TEST_DATA names; without them GSM8K-like answers are generated, and the kinds that
need data sets are left out.

`overhead`: on one core, one program after another, in turn: the scorer on a small program against plain `python -I`
with the same program and asserts in one file. Differences are taken within a turn; median, and the middle 80 % of them.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.publishing import add_replace, result_path
from benchmarks.runs import command_of, write
from benchmarks.spreads import median_spread
from services.processes.framing import frame
from services.reward.code_options import CodeOptions
from services.reward.config import RewardSettings
from services.reward.job import Job, Outcome
from services.reward.pool import Pool
from services.reward.scorers.port import ScorerInput
from services.reward.scorers.programs import CodeScorer

ADD_TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(10, 20) == 30"]
ADD, WRONG_ADD = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"
SUM_TESTS = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 20\n", "output": "30\n"}]
SUM, WRONG_SUM = "print(sum(map(int, input().split())))\n", "print(7)\n"
FILES = ("gsm8k/train.jsonl", "gsm8k/test.jsonl", "math/math_train.jsonl.gz", "math/math_test.jsonl.gz",
         "code/humaneval.jsonl", "code/mbpp_nontest.jsonl")  # fmt: skip
DATA = Path(os.environ.get("AREAL_LIKE_TEST_DATA", "."))
TARGETS = {"maths, GSM8K": 200.0, "code, asserts": 25.0, "code, inputs": 25.0, "code, published": 25.0}
"""Target verdicts per second on two cores."""
TARGET_OVERHEAD_MS = 40.0
WARM_UP_SHARE = 0.5
"""Length of the warm-up, as a share of one window."""
NUM_WINDOWS = 5

Work = list[tuple[dict[str, Any], str]]


def rows_of(name: str) -> list[dict[str, Any]]:
    """Rows of a published file; empty if it is not found."""
    file = DATA / name
    if not file.is_file():
        return []
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in content.splitlines()]


def word_problems() -> Work:
    """Solutions of GSM8K, every second one with a wrong final answer."""
    rows = rows_of("gsm8k/test.jsonl")
    if not rows:
        numbers = random.Random(1).sample(range(10, 100_000), 500)
        rows = [{"answer": f"{a} and 3 more: {a} + 3 = {a + 3}\n#### {a + 3}"} for a in numbers]
    work: Work = []
    for number, row in enumerate(rows):
        words, _, answer = row["answer"].partition("####")
        stated = answer.strip() if number % 2 else f"{number}7"
        ending = (f"The answer is {stated}.", f"#### {stated}", f"So it is $\\boxed{{{stated}}}$.")[number % 3]
        work.append(({"answer": row["answer"]}, f"{words}{ending}"))
    return work


def expressions() -> Work:
    """Solutions of MATH, every second one with the next one's answer."""
    rows = rows_of("math/math_test.jsonl.gz")[::10]
    gold = [row["answer"] for row in rows]
    return [({"answer": gold[(number + number % 2) % len(gold)]}, row["solution"]) for number, row in enumerate(rows)]


def published() -> Work:
    """References of HumanEval and MBPP, every second one with an error."""
    work: Work = []
    for name, column in (("code/humaneval.jsonl", "canonical_solution"), ("code/mbpp_nontest.jsonl", "code")):
        work += [(row, row[column].replace("return", "return 7 or", n % 2)) for n, row in enumerate(rows_of(name))]
    return work


async def verdicts_per_s(kind: str, work: Work, num_workers: int, window_s: float) -> dict[str, Any]:
    """Score for NUM_WINDOWS windows after a warm-up, repeating the same work."""
    settings = RewardSettings.model_validate(
        {"scorers": [{"kind": kind}], "num_workers": num_workers, "num_spares": 0, "retries": 0}
    )
    pool = Pool(settings)
    ends: list[float] = []
    kinds: list[str] = []
    jobs = _jobs(work)

    async def lane() -> None:
        while True:
            job_id, job = next(jobs)
            outcome: Outcome = await pool.attempt(job, job_id, settings.timeout_s)
            ends.append(time.monotonic())
            kinds.append(outcome.kind)

    try:
        await pool.start()
        tasks = [asyncio.create_task(pool.run())]
        while pool.num_ready < num_workers:  # noqa: ASYNC110  (a benchmark's start-up)
            await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(lane()) for _ in range(num_workers)]
        await asyncio.sleep(WARM_UP_SHARE * window_s)
        began_s, num_before = time.monotonic(), len(ends)
        await asyncio.sleep(NUM_WINDOWS * window_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await pool.close()
    counts = [0] * NUM_WINDOWS
    for end in ends[num_before:]:
        counts[min(int((end - began_s) / window_s), NUM_WINDOWS - 1)] += 1
    return {
        **median_spread([count / window_s for count in counts]),
        "verdicts": len(ends) - num_before,
        "different_answers": len(work),
        "not_scored": sum(kind != "scored" for kind in kinds),
    }


def _jobs(work: Work) -> Iterator[tuple[int, bytes]]:
    for job_id, (row, response) in zip(itertools.count(1), cycle(work), strict=False):
        job = Job(job_id=job_id, scorer="", row=row, response=response, finish_reason="stop", num_tokens=1)
        yield job_id, frame(job)


def overhead(num_turns: int) -> dict[str, dict[str, float]]:
    """Milliseconds on one core. `..._beside_bare`: additional time of a sandboxed program over plain `python -I`."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
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
            "bare": lambda: bare("-I"),
            "bare_without_site": lambda: bare("-I", "-S"),
            "asserts": lambda: score(row),
            "inputs": lambda: score(stream_row),
        }
        spent: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(num_turns + 2):
            for name, run in sides.items():
                started_s = time.perf_counter()
                run()
                spent[name].append(1000 * (time.perf_counter() - started_s))
    os.sched_setaffinity(0, cores)
    measured = {name: times[2:] for name, times in spent.items()}
    for kind in ("asserts", "inputs"):
        pairs = zip(measured[kind], measured["bare"], strict=True)
        measured[f"{kind}_beside_bare"] = [sandboxed - bare_ms for sandboxed, bare_ms in pairs]
    return {name: _middle(times) for name, times in measured.items()}


def _middle(times: Sequence[float]) -> dict[str, float]:
    tenths = statistics.quantiles(times, n=10)
    return {"median": statistics.median(times), "low": tenths[0], "high": tenths[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter, and no result file")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    add_replace(parser)
    options = parser.parse_args()
    window_s, num_turns = (1.0, 20) if options.quick else (6.0, 150)
    kinds: dict[str, tuple[str, Work]] = {
        "maths, GSM8K": ("math", word_problems()),
        "maths, MATH": ("math", expressions()),
        "code, asserts": ("code", [({"tests": ADD_TESTS}, ADD), ({"tests": ADD_TESTS}, WRONG_ADD)]),
        "code, inputs": ("code", [({"tests": SUM_TESTS}, SUM), ({"tests": SUM_TESTS}, WRONG_SUM)]),
        "code, published": ("code", published()),
    }
    results: dict[str, Any] = {"workers": options.workers, "throughput": {}}
    for name, (kind, work) in kinds.items():
        if not work:
            print(f"{name}: left out, no files in {DATA}")
            continue
        rates = asyncio.run(verdicts_per_s(kind, work, options.workers, window_s))
        results["throughput"][name] = rates | ({"target": TARGETS[name]} if name in TARGETS else {})
        aim = f"  target {TARGETS[name]:.0f}" if name in TARGETS else ""
        rate_range = f"({rates['low']:.1f} to {rates['high']:.1f})"
        print(
            f"{name:18} {rates['median']:7.1f} verdicts/s {rate_range:20}{aim}  {rates['not_scored']} without a score"
        )
    results["overhead_ms"] = overhead(num_turns)
    results["target_overhead_ms"] = TARGET_OVERHEAD_MS
    for name, durations in results["overhead_ms"].items():
        aim = f"  at most {TARGET_OVERHEAD_MS:.0f}" if name.endswith("beside_bare") else ""
        print(f"{name:22} {durations['median']:7.1f} ms ({durations['low']:.1f} to {durations['high']:.1f}){aim}")
    if not options.quick:
        print(f"written to {write('reward', command_of('reward'), results, result_path('reward', options))}")


if __name__ == "__main__":
    main()
