"""Memory of one more agent program, forked from a preloaded process or started from scratch.

    python -m benchmarks.agent_memory                 prints; benchmarks.killed_runs publishes it

Programs import OpenAI's SDK, create its client, as an agent does before its first request, and wait. Measured is the
proportional set size (`Pss`: a page shared by n processes counts 1/n in each) of all programs and their guards, minus
that of half as many, so that shared memory is not counted again.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from areal_like.descendants import descendants_of
from rollout.agent.programs import Preloaded, Program, Programs, Started

NUM = 8
PROGRAM = """
import time
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:9", api_key="k")
client.chat.completions
print("ready", flush=True)
time.sleep(3600)
"""


def main() -> None:
    for name, megabytes in memory_of_programs().items():
        print(f"{name}: {megabytes:.1f} MB for each program")


def memory_of_programs() -> dict[str, float]:
    """Megabytes of one more program, by the way it is started."""
    with tempfile.TemporaryDirectory() as folder:
        (script := Path(folder) / "agent.py").write_text(PROGRAM)
        command = [sys.executable, str(script)]
        return {
            "preloaded": asyncio.run(_of_one(Preloaded(command, ["openai"]))),
            "started": asyncio.run(_of_one(Started(command))),
        }


async def _of_one(programs: Programs) -> float:
    running = await _start(programs, NUM)
    before = _pss_bytes()
    running += await _start(programs, NUM)
    grown = _pss_bytes() - before
    for program in running:
        await program.end()
    if isinstance(programs, Preloaded):
        programs.close()
    return round(grown / NUM / (1 << 20), 2)


async def _start(programs: Programs, num: int) -> list[Program]:
    made = [await programs.start(os.environ) for _ in range(num)]
    for program in made:
        assert await program.output.readline() == b"ready\n"
    return made


def _pss_bytes() -> int:
    """Proportional set size of all descendants of this process."""
    total = 0
    for pid in descendants_of(os.getpid()):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


if __name__ == "__main__":
    main()
