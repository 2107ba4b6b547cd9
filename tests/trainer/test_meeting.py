"""The trainer's ranks meet at an address that somebody may have taken meanwhile."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from forked_jobs import JobServer

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.process import FAILED, report_end
from trainer.ranks import MeetingPlaceTaken, Ranks


def test_taken_meeting_place_is_an_accident_that_a_restart_solves_and_no_mistake_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        spec = ProcessSpec(
            role="trainer", name="trainer", run_id="t", run_dir=str(tmp_path), hub_address="", seed=1,
            parent_pid=os.getpid(), model=ModelSettings(path=""), sampling=SamplingSettings(),
            staleness=StalenessSettings(), groups_per_step=1, group_size=1, num_steps=1, weight_dir="", settings={},
            num_ranks=2, ranks_address=f"tcp://127.0.0.1:{port}",
        )  # fmt: skip
        with pytest.raises(MeetingPlaceTaken) as taken:
            Ranks.join(spec, "cpu", timeout_s=5.0, order_timeout_s=5.0)
    assert report_end(taken.value) == FAILED, "within the budget of restarts; each is given another place"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"error: MeetingPlaceTaken: rank 0 cannot listen on 127.0.0.1:{port}: Address already in use"


@pytest.mark.e2e
def test_batches_and_versions_are_awaited_for_longer_than_orders_because_a_step_is_between_two(
    tmp_path: Path, job_server: JobServer
) -> None:
    logs = [tmp_path / f"{rank}.log" for rank in (0, 1)]
    ranks = [
        job_server.start("waiting_rank", [str(rank), str(tmp_path / "ranks")], log) for rank, log in enumerate(logs)
    ]
    try:
        statuses = [rank.wait(300.0) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = [log.read_text() for log in logs]
    assert statuses == [0, 0], said
    assert not any("RankLost" in one for one in said)
