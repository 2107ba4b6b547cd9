"""From which checkpoint a trainer starts again, and as what."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import DeadlineExceeded
from controller.runtime import trainer_restart
from controller.runtime.supervisor import Loss
from controller.runtime.trainer_restart import Found, TrainerRestart, find_checkpoint

LOSS = Loss("trainer", "trainer", "killed", is_permanent=False)


def on_disk(monkeypatch: pytest.MonkeyPatch, **problems: str) -> list[Any]:
    """Checkpoints by name (`v3`) with what is wrong with them; returns what is done to them."""
    done: list[Any] = []

    def problem(path: Path, ledger_seq: int) -> str | None:
        done.append((path.name, ledger_seq))
        return problems[path.name] or None

    found = [(int(name[1:]), Path(name)) for name in sorted(problems)]
    monkeypatch.setattr(trainer_restart, "repair_checkpoints", lambda run_dir: done.append("repaired"))
    monkeypatch.setattr(trainer_restart, "checkpoints_on_disk", lambda run_dir: found)
    monkeypatch.setattr(trainer_restart, "checkpoint_problem", problem)
    return done


def test_the_newest_checkpoint_that_is_whole_and_known_is_found_once_the_disk_is_repaired(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = on_disk(monkeypatch, v1="", v2="", v3="a file is missing", v4="")
    found = find_checkpoint(tmp_path, num_batches=3, ledger_seq=9)
    assert (found.version, found.path) == (2, Path("v2"))
    assert found.left_out == [
        "checkpoint v4 was skipped: the ledger ends at step 3",
        "checkpoint v3 was skipped: a file is missing",
    ]
    assert done == ["repaired", ("v3", 9), ("v2", 9)]


def test_without_a_usable_checkpoint_it_is_the_starting_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_disk(monkeypatch, v1="damaged")
    assert find_checkpoint(tmp_path, num_batches=3, ledger_seq=9) == Found(
        0, None, ["checkpoint v1 was skipped: damaged"]
    )


class Bench:
    """A trainer whose ranks are gone after `num_looks`; the ledger has three batches."""

    def __init__(self, num_looks: int = 0) -> None:
        self.num_looks = num_looks
        self.changes: dict[str, Any] = {}
        self.asked: list[int] = []
        supervisor = SimpleNamespace(living=self.living, renew=self.renew)
        ledger = SimpleNamespace(seq=9, batches_after=self.batches_after)
        self.restart = TrainerRestart(
            Path("run"), ledger, supervisor, num_lineages=2, new_address=lambda: "file:///new"  # type: ignore[arg-type]
        )  # fmt: skip

    def living(self, role: str) -> list[str]:
        assert role == "trainer"
        self.num_looks -= 1
        return ["trainer-1"] if self.num_looks >= 0 else []

    def renew(self, change: Any) -> None:
        change(SimpleNamespace(model_copy=lambda update: self.changes.update(update)))

    def batches_after(self, version: int) -> tuple[int, ...]:
        self.asked.append(version)
        return tuple(step for step in (1, 2, 3) if step > version)


@pytest.mark.parametrize(("path", "resume_from"), [(Path("v2"), "v2"), (None, None)])
def test_the_next_life_has_a_lineage_and_an_address_of_its_own_and_the_batches_that_follow(
    monkeypatch: pytest.MonkeyPatch, path: Path | None, resume_from: str | None
) -> None:
    looked: list[Any] = []

    def find(run_dir: Path, **facts: int) -> Found:
        looked.append((run_dir, facts))
        return Found(2 if path else 0, path, ["words"])

    monkeypatch.setattr(trainer_restart, "find_checkpoint", find)
    bench = Bench()
    event, words = asyncio.run(bench.restart.begin(LOSS))
    assert looked == [(Path("run"), {"num_batches": 3, "ledger_seq": 9})]
    assert bench.changes == {
        "lineage": "l2", "resume_from": resume_from, "is_device_taken": True, "ranks_address": "file:///new",
    }  # fmt: skip
    assert (event.reason, event.lineage, event.checkpoint_version) == ("trainer: killed", "l2", 2 if path else 0)
    assert event.batches == ((3,) if path else (1, 2, 3))
    assert words == ["words"]
    event, _ = asyncio.run(bench.restart.begin(LOSS))
    assert event.lineage == "l3"


def test_the_disk_is_looked_at_once_every_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_restart, "GONE_POLL_S", 0.0)
    bench = Bench(num_looks=3)
    monkeypatch.setattr(trainer_restart, "find_checkpoint", lambda run_dir, **facts: Found(bench.num_looks))
    event, _ = asyncio.run(bench.restart.begin(LOSS))
    assert event.checkpoint_version == -1, "the fourth look found none"


def test_a_disk_that_cannot_be_read_in_time_ends_the_restart_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_restart, "READ_S", 0.0)
    monkeypatch.setattr(trainer_restart, "_in_thread", lambda work: asyncio.Event().wait())
    with pytest.raises(DeadlineExceeded, match="the newest complete checkpoint"):
        asyncio.run(Bench().restart.begin(LOSS))


def test_a_failure_of_the_reading_thread_is_the_callers() -> None:
    def fail() -> Found:
        raise OSError("broken disk")

    with pytest.raises(OSError, match="broken disk"):
        asyncio.run(trainer_restart._in_thread(fail))
    assert asyncio.run(trainer_restart._in_thread(lambda: Found(5))).version == 5
