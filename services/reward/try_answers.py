"""`python -m services.reward.try_answers IN OUT`: scores a few answers, for `areal-like probe`.

It uses the run's own scoring processes, one job after the other on each.

IN is a `TrySpec`, OUT a list of `TryVerdict` in the same order (areal_like/probe_files.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from areal_like.probe_files import TryAnswer, TrySpec, TryVerdict, run_spec
from services.processes import process_tree
from services.processes.framing import frame
from services.reward.config import RewardSettings
from services.reward.job import Job
from services.reward.pool import Pool


async def verdicts_on(order: TrySpec) -> list[TryVerdict]:
    """Score every answer. Raises UserError if a scorer cannot be loaded."""
    settings = RewardSettings.model_validate({**order.settings, "num_workers": min(2, os.cpu_count() or 1)})
    process_tree.become_subreaper()
    pool = Pool(settings)
    try:
        await pool.start()
        async with asyncio.TaskGroup() as tasks:
            keeper = tasks.create_task(pool.run(), name="pool")
            room = asyncio.Semaphore(settings.num_workers)
            found = await asyncio.gather(
                *(_verdict(pool, room, number, one, settings.timeout_s) for number, one in enumerate(order.answers, 1))
            )
            keeper.cancel()
        return found
    finally:
        await pool.close()


async def _verdict(pool: Pool, room: asyncio.Semaphore, number: int, one: TryAnswer, timeout_s: float) -> TryVerdict:
    job = Job(
        job_id=number, scorer="", row=one.row, response=one.response, finish_reason=one.finish_reason,
        num_tokens=one.num_tokens,
    )  # fmt: skip
    async with room:
        outcome = await pool.attempt(frame(job), number, timeout_s)
    correct = outcome.components.get("correct")
    return TryVerdict(kind=outcome.kind, value=outcome.value, correct=correct, reason=outcome.reason)


def main(source: Path, target: Path) -> None:
    """Run the process."""
    run_spec(source, target, TrySpec, lambda order: asyncio.run(verdicts_on(order)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
