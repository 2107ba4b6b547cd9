"""Requests the statistics of a reward service: one connection, one request, one reply within a deadline."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from areal_like.errors import DeadlineExceeded
from areal_like.transport.channel import Peer
from areal_like.wire.messages import SHARED_RUN, Goodbye, Heartbeat, Hello, Refused, StatsReply, StatsRequest, Welcome

ASK_AGAIN_S = 1.0
_ACCEPT: frozenset[type] = frozenset({Welcome, Refused, StatsReply, Goodbye})


async def ask_stats(address: str, *, curve_dir: Path, run_id: str = SHARED_RUN, timeout_s: float = 5.0) -> StatsReply:
    """Health and statistics of the service at `address` (tcp://host:port).

    Raises UserError for an address or keys that cannot be used, ChannelError if the service refuses the connection,
    DeadlineExceeded if there is no answer (no service there, or other keys).
    """
    deadline_s = time.monotonic() + timeout_s
    identity = secrets.token_hex(8)
    peer = Peer(
        address=address,
        hello=Hello(role="controller", name=f"stats-{identity}", pid=os.getpid(), run_id=run_id, incarnation=identity),
        curve_dir=curve_dir,
        audience="services",
        accept=_ACCEPT,
        heartbeat_s=timeout_s,
        silence_s=timeout_s,
        status=lambda: Heartbeat(state="asks"),
    )
    await peer.connect(timeout_s)
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            await peer.send(StatsRequest(request_id=identity), timeout_s=left_s)
            answer = await peer.receive(min(left_s, ASK_AGAIN_S))
            if isinstance(answer, StatsReply):
                return answer
        raise DeadlineExceeded("statistics", f"the reward service at {address}", timeout_s)
    finally:
        await peer.close("asked")
