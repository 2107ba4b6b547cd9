"""A hub under attack, in a process of its own: it lives, serves honest peers afterwards, and its memory is bounded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attack import GROWTH_BYTES, STRANGERS, PeakMemory, key_without_token
from channel_harness import WAIT_S, hello, open_peer, returned
from made_keys import KEYS, keys_of, run_keys

from areal_like.wire.messages import SampleAck

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
BACKLOG = 1500
OLD_HEARTBEAT_S = 5.0
"""The interval of ZeroMQ's own heartbeats when hubs still had them."""
KILLED_PEER = """
import sys, time
sys.path[:0] = sys.argv[3:]
from channel_harness import RawPeer, hello, returned
peer = RawPeer(sys.argv[1], send_queue=0)
peer.say_hello("rollout-1")
for number in range(int(sys.argv[2])):
    peer.send(returned(lease_id=number))
print("sent", flush=True)
time.sleep(60)
"""


class HubChild:
    """`hub_child.py` and the words to and from it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("hub_child.py")), str(run_keys())],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        assert self.process.poll() is None, f"the hub died: {self.process.stderr and self.process.stderr.read()}"
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def facts(self) -> dict[str, Any]:
        self.tell("say")
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def hub_child() -> Iterator[HubChild]:
    child = HubChild()
    yield child
    child.close()


async def _exchange(address: str) -> None:
    async with open_peer(address, hello("rollout-0"), curve_dir=keys_of("rollout", "rollout-0")) as peer:
        await peer.connect(WAIT_S)
        for number in range(20):
            await peer.send(returned(lease_id=number))
            assert await peer.receive(WAIT_S) == SampleAck(lease_ids=(number,))


@pytest.mark.e2e
def test_killed_peer_with_a_backlog_does_not_abort_the_hub(hub_child: HubChild) -> None:
    """An honest peer is killed while more waits for the hub than its queue takes; the hub reads it afterwards."""
    command = [sys.executable, "-c", KILLED_PEER, hub_child.address, str(BACKLOG), str(ROOT), str(ROOT / "tests")]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, KEYS: str(run_keys())})
    assert peer.stdout is not None
    assert peer.stdout.readline() == "sent\n"
    time.sleep(1.0)  # the hub's queue fills up
    peer.send_signal(signal.SIGKILL)
    peer.communicate()
    time.sleep(2 * OLD_HEARTBEAT_S + 1.0)  # the first one finds the connection broken, the second one aborted
    hub_child.tell("read")
    asyncio.run(_exchange(hub_child.address))
    facts = hub_child.facts()
    assert facts["num_read"] > 20, "also some of what the killed one had sent"
    assert facts["peers"] == [] or facts["peers"] == ["rollout-1"], facts


def _refused(hub: HubChild) -> bool:
    """Whether the hub refused a Hello without a token, and messages of a peer that is not registered."""
    counters = hub.facts()["counters"]
    return min(counters.get("rejected_hello", 0), counters.get("rejected_unknown_peer", 0)) > 0


def test_hub_survives_strangers_and_serves_honest_peers(hub_child: HubChild) -> None:
    hub_child.tell("read")
    asyncio.run(_exchange(hub_child.address))
    with PeakMemory(hub_child.process.pid) as memory:
        for attack in STRANGERS:
            attack(hub_child.address)
        key_without_token(hub_child.address, run_keys(), run_id="r", refused=lambda: _refused(hub_child))
        asyncio.run(_exchange(hub_child.address))
        facts = hub_child.facts()
    assert facts["num_read"] == 40, "nothing but the honest peer's was read"
    assert _refused(hub_child), facts
    assert memory.growth < GROWTH_BYTES, f"{memory.growth >> 20} MiB"


def test_hub_that_does_not_read_holds_little_of_strangers_and_of_key_holders(hub_child: HubChild) -> None:
    with PeakMemory(hub_child.process.pid) as memory:
        for attack in STRANGERS:
            attack(hub_child.address)
        key_without_token(hub_child.address, run_keys(), run_id="r")
        hub_child.tell("read")
        asyncio.run(_exchange(hub_child.address))
    assert memory.growth < GROWTH_BYTES, f"{memory.growth >> 20} MiB"
