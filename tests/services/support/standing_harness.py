"""Reward services that stand alone, and the rollout workers' own client to ask them, for the tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from reward_harness import PATIENCE_S, ROOT, wait_until

from areal_like.trajectory import Segment
from areal_like.transport.channel import Peer
from areal_like.transport.credentials import service_keys_folder
from areal_like.transport.service_stats import ask_stats
from areal_like.wire.messages import SHARED_RUN, Heartbeat, Hello, SampleTask, Sampling, StatsReply
from rollout.reward_client import ACCEPT, RewardClient


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """`python -m services.reward ...` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "services.reward", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **more,
    )  # fmt: skip


class Standing:
    """One service started as a user starts it."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        *arguments: str,
        name: str = "reward",
        bind: str = "tcp://127.0.0.1:0",
    ) -> None:
        self.folder = folder
        config = folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump({"reward": settings}))
        self._output, self.log_path = folder / f"{name}.out", folder / f"{name}.log"
        with self._output.open("wb") as output, self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.reward", "serve", "--config", str(config), "--bind", bind,
                 "--name", name, *arguments],
                cwd=ROOT, stdout=output, stderr=log,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        wait_until(lambda: self.address or self.process.poll() is not None, "the service's address")
        assert self.process.poll() is None, self.log

    @property
    def address(self) -> str:
        return self._output.read_text().strip()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stats(self, curve_dir: Path | None = None) -> StatsReply:
        return asyncio.run(ask_stats(self.address, curve_dir=curve_dir or service_keys_folder(), timeout_s=PATIENCE_S))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:  # nothing may outlive the tests, not even on a starved machine
                self.kill()


@contextlib.asynccontextmanager
async def connected(
    addresses: Sequence[str], *, run: str = "run-a", curve_dir: Path | None = None, **more: Any
) -> AsyncIterator[RewardClient]:
    """A client of these services, as a rollout worker of `run` has one."""
    incarnation = secrets.token_hex(8)
    hello = Hello(role="rollout", name=f"{run}/rollout-0", pid=os.getpid(), run_id=SHARED_RUN, incarnation=incarnation)
    peers = [
        Peer(
            address=address, hello=hello, curve_dir=curve_dir or service_keys_folder(), audience="services",
            accept=ACCEPT, heartbeat_s=0.1, silence_s=10.0, status=lambda: Heartbeat(state="score"),
        )
        for address in addresses
    ]  # fmt: skip
    given = {"deadline_s": 20.0, "total_deadline_s": 60.0, "silence_s": 10.0, "tick_s": 0.1, "move_after_s": 1.0}
    client = RewardClient(peers, name=f"rollout-0.{incarnation}", **{**given, **more})
    running = asyncio.create_task(client.run())
    try:
        await until(lambda: all(link.is_up for link in client._links))
        yield client
    finally:
        running.cancel()
        await asyncio.wait({running})
        await client.close()


async def until(is_true: Callable[[], Any]) -> None:
    """Wait for a fact; the bound is only there to end a broken test."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():  # noqa: ASYNC110  (nobody tells us)
            await asyncio.sleep(0.005)


def task(do: str, **row: Any) -> SampleTask:
    """A sample whose answer the zoo's scorer treats as `do` says."""
    return SampleTask(
        lease_id=1, group_id=1, sample_index=0, purpose="train", min_version=0, row={"do": do, **row},
        sampling=Sampling(), seed=1, prefix=Segment.empty(),
    )  # fmt: skip
