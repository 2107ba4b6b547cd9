"""With several ranks of the trainer the devices are given away only once every rank has released its memory."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from forked_jobs import JobServer

pytestmark = pytest.mark.processes


def test_rank_0_announces_nothing_before_every_rank_has_released_its_memory(
    tmp_path: Path, job_server: JobServer
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    logs = [tmp_path / f"{rank}.log" for rank in (0, 1)]
    ranks = [
        job_server.start("colocated_rank", [str(rank), address, str(tmp_path / "released")], log)
        for rank, log in enumerate(logs)
    ]
    try:
        statuses = [rank.wait(300.0) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = [log.read_text() for log in logs]
    assert statuses == [0, 0], said
    assert all("released" in one.splitlines() for one in said), said
