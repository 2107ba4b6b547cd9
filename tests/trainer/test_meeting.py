"""The trainer's ranks meet at an address that somebody may have taken meanwhile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


WAITS_LONGER_THAN_FOR_AN_ORDER = """
import sys, time
from types import SimpleNamespace
from trainer.ranks import Ranks
rank = int(sys.argv[1])
place = SimpleNamespace(rank=rank, num_ranks=2, ranks_address="file://" + sys.argv[2], has_own_gpus=False)
ranks = Ranks.join(place, "cpu", timeout_s=60.0, order_timeout_s=1.0)
if rank:
    assert ranks.versions.next_call() == 7
    assert ranks.next_batch() is None
else:
    time.sleep(3.0)
    ranks.versions.call(7)
    time.sleep(3.0)
    ranks.end_batches()
ranks.close()
"""


@pytest.mark.e2e
def test_batches_and_versions_are_awaited_for_longer_than_orders_because_a_step_is_between_two(
    tmp_path: Path,
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WAITS_LONGER_THAN_FOR_AN_ORDER, str(rank), str(tmp_path / "ranks")],
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.communicate(timeout=120.0)[1].count("RankLost") == 0
            assert rank.returncode == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
