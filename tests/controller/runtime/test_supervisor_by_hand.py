"""The supervisor's limits and bookkeeping, with processes, hub and clock that the test plays: no process is started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import ProcessDied, UserError
from areal_like.process import DIVERGED, USER_MISTAKE
from controller.launch.launcher import Launcher, Say
from controller.runtime.supervisor import Loss, Supervisor
from controller.telemetry.pulse import ProcessNow


@dataclass
class PlayedProcess:
    pid: int
    returncode: int | None = None
    awaited: str = ""
    survives_kill: bool = False
    cpu_s: float | None = 2.0
    rss_mb: float | None = 64.0

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        if not self.survives_kill and self.returncode is None:
            self.returncode = -9

    async def wait(self) -> None:
        return


class PlayedLauncher(Launcher):
    """Starts `PlayedProcess`es, whose ids count from 1."""

    host = "127.0.0.1"

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir)
        self.starts: list[tuple[str, list[str]]] = []
        self.environments: list[Mapping[str, str]] = []

    async def open(self, say: Say) -> bool:
        return True

    async def close(self) -> None:
        return

    async def address_for(self, name: str) -> str:
        return f"tcp://{self.host}:1"

    async def _spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> PlayedProcess:
        self.starts.append((name, list(argv)))
        self.environments.append(environment)
        return PlayedProcess(len(self.starts))

    def process(self, name: str) -> PlayedProcess:
        played = self._children[name].process
        assert isinstance(played, PlayedProcess)
        return played

    def exits(self, name: str, returncode: int, words: str = "") -> None:
        with self.log_of(name).open("a") as log:
            log.write(words)
        self.process(name).returncode = returncode


@dataclass
class PlayedHub:
    peers: dict[str, Any] = field(default_factory=dict)
    silent_ones: list[str] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)

    def silent(self, silence_s: float) -> list[str]:
        self.limits_s.append(silence_s)
        return self.silent_ones

    def forget(self, name: str) -> None:
        self.peers.pop(name, None)
        self.silent_ones = [other for other in self.silent_ones if other != name]


@dataclass
class Spec:
    name: str
    role: Any
    rank: int = 0
    num_ranks: int = 1
    num_threads: int = 3
    saved: list[int] = field(default_factory=list)

    def save(self, path: Path) -> None:
        self.saved.append(self.num_threads)


class Bench:
    """A supervisor of processes given as name=role or as trainer's ranks; times are added up from 0."""

    def __init__(self, folder: Path, *names: str, max_restarts: int = 9) -> None:
        self.folder, self.now_s, self.hub, self.launcher = folder, 0.0, PlayedHub(), PlayedLauncher(folder)
        self.supervisor = Supervisor(
            self.launcher, self.hub, startup_timeout_s=30.0, silence_s=5.0, node_wait_s=100.0,  # type: ignore[arg-type]
        )  # fmt: skip
        self.specs = {name: self.add(name, max_restarts) for name in names}

    def add(self, name: str, max_restarts: int = 9) -> Spec:
        role, _, rank = name.partition("-")
        spec = Spec(name, role, rank=int(rank or 0), num_ranks=2) if role == "trainer" else Spec(name, role)
        self.supervisor.add(spec, self.folder / f"{name}.json", max_restarts, self.now_s)  # type: ignore[arg-type]
        return spec

    def tick(self, seconds: float = 0.0) -> list[Loss]:
        self.now_s += seconds
        return asyncio.run(self.supervisor.tick(self.now_s))

    def judged(self) -> list[Loss]:
        """Losses of the processes that have ended by now."""
        assert self.tick() == []
        return self.tick(0.3125)

    def report(self, name: str, state: str = "generate", **counters: float) -> None:
        """It says Hello, and then sends a heartbeat."""
        heartbeat = SimpleNamespace(state=state, counters=counters)
        pid = self.launcher.pid_of(name)
        self.hub.peers[name] = SimpleNamespace(pid=pid, incarnation="a", heartbeat=heartbeat)
        self.supervisor.reported(name)

    @property
    def started(self) -> list[str]:
        return [name for name, _ in self.launcher.starts]


def test_a_process_is_started_once_with_its_module_its_spec_and_its_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench = Bench(tmp_path, "rollout-0", "reward-0")
    assert bench.specs["rollout-0"].saved == [3]
    assert bench.supervisor.states() == {"rollout-0": "starting", "reward-0": "starting"}
    for _ in range(3):
        assert bench.tick() == []
    assert bench.launcher.starts == [
        (name, ["-m", module, "--spec", str(tmp_path / f"{name}.json")])
        for name, module in (("rollout-0", "rollout"), ("reward-0", "services.reward"))
    ]
    assert [found["OMP_NUM_THREADS"] for found in bench.launcher.environments] == ["3", "3"]
    assert "started rollout-0 (process 1)" in caplog.messages


def test_an_exit_is_judged_when_its_last_words_have_had_their_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.launcher.exits("rollout-0", 1, "error: out of luck\n")
    assert bench.tick(1.0) == []
    assert bench.tick(0.25) == []
    assert bench.supervisor.take_ended() == [], "its last words may still come"
    (loss,) = bench.tick(0.05)
    assert loss == Loss("rollout-0", "rollout", "out of luck", is_permanent=False, returncode=1, may_live=False)
    assert bench.supervisor.take_ended() == ["rollout-0"]
    assert bench.supervisor.take_ended() == []


def test_an_exit_is_judged_at_the_end_of_the_time_for_last_words(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.launcher.exits("rollout-0", 1)
    assert bench.tick() == []
    assert len(bench.tick(0.3)) == 1


def test_the_end_of_a_process_that_was_asked_to_end_is_no_loss(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.launcher.terminate("rollout-0")
    assert bench.judged() == []


def test_each_restart_waits_longer_up_to_ten_seconds(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    for number, wait_s in enumerate((0.0, 1.0, 3.0, 10.0, 10.0), start=1):
        assert len(bench.started) == number
        bench.launcher.exits("rollout-0", 1)
        (loss,) = bench.judged()
        assert (loss.is_permanent, loss.reason, loss.returncode) == (False, "ended with status 1", 1)
        assert bench.supervisor.restarts == number
        assert bench.supervisor.states() == {"rollout-0": f"restarting ({number} of 9)"}
        if wait_s:
            bench.tick(wait_s - 0.125)
            assert len(bench.started) == number
            bench.tick(0.125)
        else:
            bench.tick()
    assert len(bench.started) == 6


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_process_is_started_again_as_often_as_its_budget_says(tmp_path: Path, max_restarts: int) -> None:
    bench = Bench(tmp_path, "rollout-0", max_restarts=max_restarts)
    for number in range(max_restarts + 1):
        bench.tick(10.0)
        bench.launcher.exits("rollout-0", 3)
        assert [loss.is_permanent for loss in bench.judged()] == [number == max_restarts]
    assert not bench.supervisor.watches("rollout-0")
    assert bench.supervisor.restarts == max_restarts
    bench.tick(100.0)
    assert len(bench.started) == max_restarts + 1


def test_the_hub_forgets_a_dead_process_and_not_its_successor(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0", "rollout-1")
    bench.tick()
    bench.report("rollout-0")
    bench.report("rollout-1")
    bench.launcher.exits("rollout-0", 1)
    bench.launcher.exits("rollout-1", 1)
    bench.tick()
    bench.hub.peers["rollout-1"].pid = 77
    bench.tick(0.5)
    assert set(bench.hub.peers) == {"rollout-1"}
    assert bench.supervisor.take_ended() == ["rollout-0"], "a successor of rollout-1 has reported already"


def test_users_mistake_names_the_process_and_its_words_or_says_that_it_refused(tmp_path: Path) -> None:
    for words, said in (("error: no such column\n", "no such column"), ("", "rollout-0 could not start")):
        bench = Bench(tmp_path, "rollout-0")
        bench.tick()
        bench.launcher.exits("rollout-0", USER_MISTAKE, words)
        bench.tick()
        with pytest.raises(UserError) as caught:
            bench.tick(1.0)
        assert (caught.value.what, caught.value.where) == (said, "rollout-0")
        bench.launcher.log_of("rollout-0").unlink()


def test_the_exit_of_a_released_process_is_no_loss(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    assert bench.supervisor.names == ["rollout-0", "rollout-0"]
    bench.supervisor.release("rollout-0")
    assert bench.supervisor.names == ["rollout-0"], "it has not ended yet"
    bench.launcher.exits("rollout-0", 1)
    assert bench.judged() == []
    assert bench.supervisor.names == []
    assert bench.supervisor.take_ended() == ["rollout-0"]


def test_a_successor_of_a_released_process_waits_for_its_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.supervisor.release("rollout-0")
    bench.add("rollout-0")
    bench.tick(10.0)
    assert bench.started == ["rollout-0"], "the old one lives"
    bench.launcher.exits("rollout-0", 0)
    bench.tick()
    bench.tick(0.25)
    assert bench.started == ["rollout-0"], "its exit is not judged yet"
    bench.tick(0.05)
    assert bench.started == ["rollout-0"] * 2
    assert bench.supervisor.restarts == 0


def test_a_silent_process_is_killed_lost_and_started_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.report("rollout-0")
    assert bench.tick(1.0) == []
    assert set(bench.hub.limits_s) == {5.0}
    bench.hub.silent_ones = ["rollout-0", "stranger"]
    bench.launcher.process("rollout-0").survives_kill = True
    (loss,) = bench.tick()
    assert loss == Loss("rollout-0", "rollout", "silent for 5 s", is_permanent=False, may_live=True)
    assert not bench.hub.peers
    assert bench.tick(10.0) == [], "it is lost once, and not started while the old one lives"
    assert bench.started == ["rollout-0"]
    bench.launcher.process("rollout-0").returncode = -9
    assert bench.tick() == bench.tick(0.3) == [], "it was killed: its end is no news"
    assert bench.started == ["rollout-0"] * 2


@pytest.mark.parametrize("how", ["silence", "end"])
def test_one_death_is_one_loss_whatever_else_is_wrong_with_the_process(tmp_path: Path, how: str) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.report("rollout-0")
    bench.launcher.exits("rollout-0", 4)
    bench.tick()
    if how == "silence":
        bench.hub.silent_ones = ["rollout-0"]
    else:
        bench.supervisor.end("rollout-0", "it hangs")
    assert bench.tick(0.125) == []
    (loss,) = bench.tick(0.25)
    assert loss.reason == "ended with status 4"


def test_a_silent_process_is_lost_while_the_exit_of_another_is_not_judged_yet(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0", "rollout-1")
    bench.tick()
    bench.launcher.exits("rollout-1", 1)
    bench.tick()
    bench.hub.silent_ones = ["rollout-0"]
    assert [loss.name for loss in bench.tick()] == ["rollout-0"]


@pytest.mark.parametrize("reason", ["silent for 5 s", "it hangs", "no heartbeat within 30 s of its start"])
def test_a_process_that_is_lost_for_good_is_killed(tmp_path: Path, reason: str) -> None:
    bench = Bench(tmp_path, "rollout-0", max_restarts=0)
    bench.tick()
    if reason == "it hangs":
        bench.supervisor.end("rollout-0", reason)
    elif reason == "silent for 5 s":
        bench.hub.silent_ones = ["rollout-0"]
    (loss,) = bench.tick(40.0)
    assert (loss.reason, loss.is_permanent) == (reason, True)
    assert not bench.launcher.is_running("rollout-0")


def test_a_process_that_others_wait_for_in_vain_is_killed_once_with_their_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0", "rollout-1")
    bench.tick()
    bench.report("rollout-0")
    bench.report("rollout-1")
    bench.supervisor.end("rollout-0", "the load takes too long")
    bench.supervisor.end("stranger", "who is that")
    (loss,) = bench.tick()
    assert loss == Loss("rollout-0", "rollout", "the load takes too long", is_permanent=False, may_live=True)
    assert list(bench.hub.peers) == ["rollout-1"]
    bench.tick()
    assert bench.tick(0.5) == []
    assert bench.started == ["rollout-0", "rollout-1", "rollout-0"]
    assert bench.tick(1.0) == [], "the reason was meant for the one before"


def test_a_process_that_is_to_be_ended_while_it_waits_for_its_restart_is_not_lost_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    for num_started, reason in enumerate(("first", "second"), start=1):
        assert len(bench.started) == num_started
        bench.supervisor.end("rollout-0", reason)
        assert len(bench.tick()) == 1
        assert bench.judged() == []
    bench.supervisor.end("rollout-0", "third")
    assert bench.tick() == []
    assert (len(bench.started), bench.supervisor.restarts) == (2, 2)


def test_nothing_is_started_in_the_tick_that_reports_a_loss(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.add("rollout-1")
    bench.supervisor.end("rollout-0", "it hangs")
    assert bench.tick() != []
    assert bench.started == ["rollout-0"]
    bench.tick()
    assert bench.started == ["rollout-0", "rollout-1"]


def test_a_process_has_the_whole_startup_time_for_its_hello_and_no_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0", "rollout-1")
    bench.tick(1.0)
    bench.report("rollout-1")
    assert bench.tick(30.0) == []
    (loss,) = bench.tick(0.125)
    assert loss.reason == "no heartbeat within 30 s of its start"
    assert loss.name == "rollout-0"
    assert not bench.launcher.is_running("rollout-0")
    assert bench.tick(100.0) == [], "who has reported is judged by silence alone"


def test_a_late_process_whose_end_was_seen_is_lost_for_the_reason_of_its_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.tick(29.875)
    bench.launcher.exits("rollout-0", 1, "error: no memory\n")
    assert bench.tick() == bench.tick(0.25) == []
    (loss,) = bench.tick(0.125)
    assert loss.reason == "no memory"


def test_a_process_out_of_reach_has_the_time_of_a_start_to_say_hello_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0", "rollout-1")
    bench.tick()
    for name in ("rollout-0", "rollout-1"):
        bench.report(name)
        bench.supervisor.lost_touch(name, 50.0)
    bench.supervisor.lost_touch("stranger", 50.0)
    assert bench.tick(60.0) == []
    bench.supervisor.reported("rollout-1")
    bench.supervisor.reported("stranger")
    assert bench.tick(20.0) == []
    assert [loss.name for loss in bench.tick(0.125)] == ["rollout-0"]


def test_a_process_that_announced_its_leave_has_thirty_seconds_from_its_first_word(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.report("rollout-0")
    assert not bench.supervisor.is_leaving("rollout-0")
    assert bench.supervisor.is_leaving("stranger"), "it has left"
    bench.supervisor.leaving("rollout-0", 10.0)
    bench.supervisor.leaving("rollout-0", 20.0)
    bench.supervisor.leaving("stranger", 20.0)
    assert bench.supervisor.is_leaving("rollout-0")
    assert bench.tick(40.0) == []
    (loss,) = bench.tick(0.125)
    assert (loss.reason, loss.is_permanent, loss.may_live) == ("did not exit within 30 s", True, True)
    assert not bench.launcher.is_running("rollout-0")
    assert bench.supervisor.restarts == 0
    assert bench.tick() == bench.tick(20.0) == []
    assert bench.started == ["rollout-0"]


def test_a_process_that_leaves_and_ends_in_time_is_gone_for_good_with_its_own_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.supervisor.leaving("rollout-0", 0.0)
    bench.report("rollout-0")
    bench.tick(29.875)
    bench.launcher.exits("rollout-0", 0)
    assert bench.tick() == []
    assert bench.tick(0.25) == [], "its end was seen: it is judged in a moment"
    (loss,) = bench.tick(0.125)
    assert (loss.reason, loss.is_permanent) == ("ended with status 0", True)


# ------------------------------------------------------------ the trainer's ranks


def test_ranks_that_follow_need_no_hello_and_the_first_one_does(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "trainer", "trainer-1")
    bench.tick()
    assert bench.supervisor.states() == {"trainer": "starting", "trainer-1": "following"}
    (loss,) = bench.tick(31.0)
    assert loss.name == "trainer"


def test_ranks_start_again_together_when_it_is_said_from_where_and_none_is_left(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "trainer", "trainer-1", "rollout-0")
    bench.tick()
    for name in ("trainer", "rollout-0"):
        bench.report(name)
    bench.launcher.process("trainer").survives_kill = True
    bench.launcher.exits("trainer-1", 7)
    (loss,) = bench.judged()
    assert (loss.name, loss.role, loss.returncode, loss.may_live) == ("trainer-1", "trainer", 7, False)
    assert bench.supervisor.living("trainer") == ["trainer"]
    assert bench.supervisor.living("rollout") == ["rollout-0"]
    bench.supervisor.renew(lambda spec: replace(spec, num_threads=5))  # type: ignore[type-var]
    assert bench.tick(100.0) == []
    assert len(bench.started) == 3, "the first rank still lives"
    bench.launcher.process("trainer").returncode = -9
    assert bench.tick() == bench.tick(0.25) == []
    assert len(bench.started) == 3, "its end is not judged yet"
    assert bench.tick(0.125) == []
    assert bench.started[3:] == ["trainer", "trainer-1"]
    assert [found["OMP_NUM_THREADS"] for found in bench.launcher.environments] == ["3", "3", "3", "5", "5"]
    assert [spec.saved for spec in bench.specs.values()] == [[3, 5], [3, 5], [3]]
    assert bench.supervisor.restarts == 1, "they count as one"
    assert len(bench.supervisor.names_of("trainer")) == 2


def test_ranks_are_held_until_it_is_said_from_where(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "trainer", "trainer-1")
    bench.tick()
    bench.launcher.exits("trainer", 1)
    assert len(bench.judged()) == 1
    bench.tick()
    bench.tick(100.0)
    assert len(bench.started) == 2
    bench.supervisor.renew(lambda spec: spec)
    bench.tick()
    assert len(bench.started) == 4
    bench.report("trainer")
    assert bench.tick(29.0) == [], "the ranks that follow count as reported in their second life too"
    assert bench.tick(2.0) == []


def test_a_rank_that_only_lost_another_is_judged_after_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "trainer", "trainer-1", max_restarts=0)
    bench.tick()
    bench.launcher.exits("trainer", 1, "error: RankLost: trainer-1 is gone\n")
    bench.launcher.exits("trainer-1", -6)
    assert [loss.reason for loss in bench.judged()] == ["ended with signal SIGABRT", "RankLost: trainer-1 is gone"]


def test_a_released_first_rank_takes_the_others_with_it_and_no_other_process(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "trainer", "trainer-1", "rollout-0")
    bench.tick()
    bench.supervisor.release("trainer-1")
    assert bench.supervisor.names_of("trainer") == ["trainer"], "a rank that follows leaves alone"
    bench = Bench(tmp_path, "trainer", "trainer-1", "rollout-0", "rollout-1")
    bench.tick()
    bench.supervisor.release("rollout-0")
    assert bench.supervisor.names_of("trainer") == ["trainer", "trainer-1"]
    bench.supervisor.release("trainer")
    assert not bench.supervisor.watches_role("trainer")
    assert bench.supervisor.names_of("rollout") == ["rollout-1"]


@pytest.mark.parametrize(("role", "is_permanent"), [("trainer", True), ("rollout-0", False)])
def test_a_diverged_policy_is_not_trained_on_and_no_fault_of_the_process(
    tmp_path: Path, role: str, is_permanent: bool
) -> None:
    bench = Bench(tmp_path, role)
    bench.tick()
    bench.launcher.exits(role, DIVERGED, "error: the policy has diverged\n")
    (loss,) = bench.judged()
    assert (loss.is_permanent, loss.is_divergence) == (is_permanent, True)
    error = bench.supervisor.died(loss)
    assert (str(error), isinstance(error, ProcessDied)) == ("the policy has diverged", False)


def test_a_death_that_ends_a_run_brings_the_status_and_the_log_with_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0", max_restarts=0)
    bench.tick()
    bench.launcher.exits("rollout-0", 3, "Traceback\nerror: out of luck\n")
    (loss,) = bench.judged()
    assert not loss.is_divergence
    error = bench.supervisor.died(loss)
    assert isinstance(error, ProcessDied)
    assert (error.returncode, error.tail) == (3, "Traceback\nerror: out of luck")
    killed = bench.supervisor.died(replace(loss, returncode=None))
    assert isinstance(killed, ProcessDied)
    assert killed.returncode == -9


def test_words_of_an_earlier_life_are_no_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.launcher.exits("rollout-0", 1, "error: out of luck\n")
    bench.judged()
    bench.tick(1.0)
    bench.launcher.exits("rollout-0", 1)
    assert [loss.reason for loss in bench.judged()] == ["ended with status 1"]


# ------------------------------------------------------------ places on a cluster


def test_a_start_begins_when_the_process_has_its_place(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.launcher.process("rollout-0").awaited = "a GPU"
    for _ in range(9):
        assert bench.tick(10.0) == []
    assert bench.supervisor.states() == {"rollout-0": "waits for a GPU"}
    bench.launcher.process("rollout-0").awaited = ""
    assert bench.tick(30.0) == []
    assert bench.supervisor.take_news() == [
        "rollout-0 waits for a GPU, at most 100 s (launch.ray.node_wait_s)", "rollout-0 is placed",
    ]  # fmt: skip
    (loss,) = bench.tick(0.125)
    assert (loss.reason, loss.is_permanent) == ("no heartbeat within 30 s of its start", False)


def test_a_place_that_never_comes_costs_no_restart_and_is_given_up_for_good(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.launcher.process("rollout-0").awaited = "a GPU"
    bench.tick()
    assert bench.tick(100.0) == []
    (loss,) = bench.tick(0.125)
    assert loss.reason == "waited 100 s for a GPU (launch.ray.node_wait_s)"
    assert loss.is_permanent
    assert not bench.launcher.is_running("rollout-0")
    assert bench.supervisor.restarts == 0


def test_a_pool_is_unplaced_when_all_of_it_waits_and_the_trainer_when_any_rank_does(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "trainer", "trainer-1", "rollout-0", "rollout-1", "reward-0")
    bench.tick()
    for names, is_unplaced in (
        ([], False), (["rollout-0"], False), (["rollout-0", "rollout-1"], True), (["reward-0"], True),
        (["trainer-1"], True),
    ):  # fmt: skip
        for name in bench.specs:
            bench.launcher.process(name).awaited = "a GPU" if name in names else ""
        bench.tick()
        assert bench.supervisor.is_pool_unplaced() == is_unplaced, names
    bench.supervisor.release("trainer-1")
    assert not bench.supervisor.is_pool_unplaced(), "who has left waits no more"


def test_a_process_that_dies_while_it_waits_has_the_whole_time_in_its_next_life(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.launcher.process("rollout-0").awaited = "a GPU"
    bench.tick()
    bench.tick(90.0)
    bench.supervisor.end("rollout-0", "it hangs")
    assert len(bench.tick()) == 1
    assert not bench.supervisor.is_pool_unplaced()
    bench.tick(1.0)
    bench.tick(1.0)
    bench.launcher.process("rollout-0").awaited = "a GPU"
    assert bench.tick() == bench.tick(90.0) == []


@pytest.mark.parametrize("how", ["released", "left"])
def test_a_wait_for_a_place_does_not_count_for_a_successor_of_the_same_name(tmp_path: Path, how: str) -> None:
    bench = Bench(tmp_path, "rollout-0", max_restarts=0)
    bench.tick()
    bench.launcher.process("rollout-0").awaited = "a GPU"
    bench.tick()
    bench.tick(90.0)
    if how == "released":
        bench.supervisor.release("rollout-0")
        bench.launcher.exits("rollout-0", 0)
    else:
        bench.supervisor.end("rollout-0", "it hangs")
        assert [loss.is_permanent for loss in bench.tick()] == [True]
    bench.tick()
    bench.add("rollout-0")
    bench.tick(1.0)
    bench.launcher.process("rollout-0").awaited = "a GPU"
    assert bench.tick() == bench.tick(90.0) == []


def test_all_ranks_wait_for_their_places_from_the_start_of_their_new_life(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "trainer", "trainer-1")
    bench.tick()
    bench.launcher.process("trainer-1").awaited = "a GPU"
    bench.tick()
    bench.tick(29.0)
    bench.supervisor.end("trainer", "it hangs")
    assert len(bench.tick()) == 1
    assert not bench.supervisor.is_pool_unplaced()


# ------------------------------------------------------------ what is reported to others


def test_states_and_figures_of_each_process_are_those_of_its_newest_heartbeat(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0", "rollout-1", "trainer")
    bench.tick()
    bench.report("rollout-0", tokens=3.0)
    bench.hub.peers["rollout-1"] = SimpleNamespace(pid=2, incarnation="b", heartbeat=None)
    assert bench.supervisor.processes() == {
        "rollout-0": ProcessNow("rollout", "generate", 1, "a", {"tokens": 3.0}, 64.0),
        "rollout-1": ProcessNow("rollout", "starting", 2, rss_mb=64.0),
        "trainer": ProcessNow("trainer", "starting", 3, rss_mb=64.0),
    }
    assert bench.supervisor.watches_role("trainer")
    assert not bench.supervisor.watches_role("reward")
    assert bench.supervisor.watches("trainer")
    assert bench.supervisor.is_running("rollout-1")
    bench.launcher.exits("rollout-1", 0)
    assert not bench.supervisor.is_running("rollout-1")
    assert bench.supervisor.living("rollout") == ["rollout-0"]
    assert bench.supervisor.cpu_seconds()["rollout-0"] == 2.0
    assert "rollout-0" not in bench.supervisor.queue_seconds(), "only processes of this machine have it"


# ---------------------------------------------------------------- external workers


def external(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.supervisor.add_external(Spec("rollout-7", "rollout"), "gpu7", bench.now_s)  # type: ignore[arg-type]
    heartbeat = SimpleNamespace(state="generate", counters={})
    bench.hub.peers["rollout-7"] = SimpleNamespace(pid=44, incarnation="a", heartbeat=heartbeat)
    return bench


def test_an_external_worker_is_shown_with_its_machine_and_never_started(tmp_path: Path) -> None:
    bench = external(tmp_path)
    for _ in range(3):
        assert bench.tick(100.0) == []
    assert bench.started == []
    now = bench.supervisor.processes()["rollout-7"]
    assert (now.host, now.pid, now.state) == ("gpu7", 44, "generate")
    assert now.row()["host"] == "gpu7"
    assert bench.supervisor.is_external("rollout-7")


def test_silence_of_an_external_worker_is_a_loss_after_which_it_may_return(tmp_path: Path) -> None:
    bench = external(tmp_path)
    bench.hub.silent_ones = ["rollout-7"]
    (loss,) = bench.tick()
    assert loss == Loss("rollout-7", "rollout", "silent for 5 s", is_permanent=True, may_return=True)
    assert not bench.supervisor.watches("rollout-7")
    assert not bench.supervisor.is_running("rollout-7")


def test_a_reported_end_of_an_external_worker_is_judged_after_its_last_words_and_is_final(tmp_path: Path) -> None:
    bench = external(tmp_path)
    bench.supervisor.external_ended("rollout-7", "out of memory", bench.now_s)
    assert bench.tick(0.25) == []
    (loss,) = bench.tick(0.05)
    assert loss == Loss("rollout-7", "rollout", "out of memory", is_permanent=True)
    assert bench.hub.peers == {}


def test_reports_about_other_processes_are_ignored(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "rollout-0")
    bench.tick()
    bench.supervisor.external_ended("rollout-0", "it lies", bench.now_s)
    bench.supervisor.external_ended("nobody", "it lies", bench.now_s)
    assert bench.tick(1.0) == []
    assert bench.supervisor.watches("rollout-0")


def test_a_report_that_comes_after_the_goodbye_is_no_loss(tmp_path: Path) -> None:
    bench = external(tmp_path)
    bench.supervisor.external_ended("rollout-7", "status 1", bench.now_s)
    bench.supervisor.release("rollout-7")
    assert bench.tick(1.0) == []


def test_the_end_of_the_run_waits_for_an_external_worker_until_its_goodbye(tmp_path: Path) -> None:
    bench = external(tmp_path)
    bench.supervisor.release("rollout-7")
    assert bench.supervisor.is_running("rollout-7")
    bench.hub.peers.clear()
    assert not bench.supervisor.is_running("rollout-7")
