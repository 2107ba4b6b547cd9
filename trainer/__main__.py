"""`python -m trainer --spec FILE`: the trainer process."""

from __future__ import annotations

import asyncio

from areal_like import quick_exit
from areal_like.config import ProcessSpec
from areal_like.process import run_process


async def main(spec: ProcessSpec, stop: asyncio.Event) -> None:
    """Run the trainer. torch is imported here, after the number of threads is set and error reports are set up."""
    from trainer.worker import serve

    await serve(spec, stop)


if __name__ == "__main__":
    quick_exit.run(lambda: run_process(main))
