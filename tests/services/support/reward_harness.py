"""A real reward service on loopback, a controller's hub for its heartbeats, and a client, for the tests."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
from made_keys import keys_of, run_keys

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.transport.channel import Hub, Peer
from areal_like.verdict import Verdict
from areal_like.wire.messages import Goodbye, Heartbeat, Hello, Message, ScoreRefused, ScoreReply, ScoreRequest
from services.processes.process_tree import living

ROOT = Path(__file__).parents[3]
PATIENCE_S = 300.0


def wait_until(is_true: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for a fact; the bound is only there to end a broken test."""
    give_up_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < give_up_s, f"waited without result for: {what}"
        time.sleep(0.01)


class Service:
    """Starts the service process; talks to it from a thread of its own."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], *, wait: bool = True, extra_path: Path | None = None
    ) -> None:
        self.folder = folder
        self._ids = itertools.count()
        self.replies: dict[str, list[Verdict]] = defaultdict(list)
        self.refused: dict[str, str] = {}
        self.longest_queue = 0.0
        self._peers: list[Peer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.hub = Hub(
            run_id="r", role="controller", bind="tcp://127.0.0.1:0", curve_dir=run_keys(), accept=frozenset()
        )
        hub_address = self.call(self.hub.start())
        self._start(self._listen())
        spec = ProcessSpec(
            role="reward", name="reward0", run_id="r", run_dir=str(folder), hub_address=hub_address,
            bind_address="tcp://127.0.0.1:0", parent_pid=os.getpid(), seed=1, heartbeat_s=0.05, model=ModelSettings(),
            sampling=SamplingSettings(), staleness=StalenessSettings(), groups_per_step=1, group_size=1, num_steps=1,
            weight_dir=str(folder), curve_dir=str(keys_of("reward", "reward0")), settings=settings,
        )  # fmt: skip
        spec.save(folder / "spec.json")
        self.log_path = folder / "log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.reward", "--spec", str(folder / "spec.json")],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(map(str, filter(None, (Path(__file__).parent, extra_path)))),
                },
            )
        self.client: Peer | None = None
        if wait:
            address_file = folder / "processes" / "reward0.address"
            wait_until(lambda: address_file.exists() or self.process.poll() is not None, "the service's address")
            assert self.process.poll() is None, self.log
            self.address = address_file.read_text()
            self.client = self.connect("client")

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(lambda: self._tasks.append(self._loop.create_task(work)))

    async def _listen(self) -> None:
        while True:
            await self.hub.receive(0.05)
            self.longest_queue = max(self.longest_queue, self.counters().get("queue", 0.0))

    def counters(self) -> dict[str, float]:
        """The newest heartbeat's."""
        info = self.hub.peers.get("reward0")
        return dict(info.heartbeat.counters) if info is not None and info.heartbeat is not None else {}

    def connect(self, name: str, incarnation: str = "a") -> Peer:
        peer = Peer(
            address=self.address,
            hello=Hello(role="rollout", name=name, pid=os.getpid(), run_id="r", incarnation=incarnation),
            curve_dir=run_keys(),
            audience="services",
            accept=frozenset({ScoreReply, ScoreRefused, Goodbye}),
            heartbeat_s=0.5,
            silence_s=15.0,
            status=lambda: Heartbeat(state="test"),
        )
        self.call(peer.connect(PATIENCE_S))
        self._peers.append(peer)
        self._start(self._collect(peer))
        return peer

    async def _collect(self, peer: Peer) -> None:
        while True:
            message = await peer.receive(1.0)
            if isinstance(message, ScoreReply):
                self.replies[message.request_id].append(message.verdict)
            elif isinstance(message, ScoreRefused):
                self.refused[message.request_id] = message.reason

    def send(self, message: Message, peer: Peer | None = None) -> None:
        peer = peer or self.client
        assert peer is not None
        self.call(peer.send(message))

    def send_frames(self, frames: list[Any]) -> None:
        """Put raw frames on the client's connection."""
        peer = self.client
        assert peer is not None

        async def put() -> None:
            assert peer._try_send(frames)

        self.call(put())

    def request(self, do: str, response: str = "", deadline_s: float = PATIENCE_S, **row: Any) -> ScoreRequest:
        return ScoreRequest(
            request_id=f"q{next(self._ids)}",
            scorer=row.pop("scorer", ""),
            row={"do": do, **row},
            response=response,
            finish_reason="stop",
            num_tokens=7,
            deadline_s=deadline_s,
        )

    def post(self, do: str, response: str = "", deadline_s: float = PATIENCE_S, **row: Any) -> str:
        """Ask without waiting; gives the request's id."""
        request = self.request(do, response, deadline_s, **row)
        self.send(request)
        return request.request_id

    def verdict_of(self, request_id: str) -> Verdict:
        wait_until(lambda: self.replies[request_id], f"the verdict on {request_id}; log: {self.log[-3000:]}")
        return self.replies[request_id][0]

    def ask(self, do: str, response: str = "", deadline_s: float = PATIENCE_S, **row: Any) -> Verdict:
        return self.verdict_of(self.post(do, response, deadline_s, **row))

    def scoring_pids(self) -> set[int]:
        return living(child.pid for child in psutil.Process(self.process.pid).children())

    def wait_full(self, num_processes: int) -> None:
        """The pool is at full strength (of the newest heartbeat, and of the process table)."""
        wait_until(
            lambda: self.counters().get("processes") == num_processes and len(self.scoring_pids()) == num_processes,
            f"a pool of {num_processes}",
        )

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)
        self.call(self._close_sockets())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _close_sockets(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(peer.close() for peer in self._peers))
        await self.hub.close()
