"""Claims about the supervisor, with real tiny processes and a hub that follows a script."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import bounded, until

from areal_like.errors import ProcessDied, UserError
from areal_like.process import DIVERGED, last_error
from controller.launch.local import LocalLauncher
from controller.runtime.supervisor import LAST_WORDS_S, LEAVE_S, Loss, Supervisor
from controller.telemetry.pulse import ProcessNow

pytestmark = pytest.mark.processes

SLEEP = "import time; time.sleep(60)"
JUDGED_S = LAST_WORDS_S + 0.01


@dataclass
class HubOfWords:
    """The part of the hub that the supervisor looks at."""

    peers: dict[str, Any] = field(default_factory=dict)
    silent_ones: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def silent(self, silence_s: float) -> list[str]:
        silent, self.silent_ones = self.silent_ones, []
        return silent

    def forget(self, name: str) -> None:
        self.peers.pop(name, None)
        self.forgotten.append(name)


@dataclass
class Spec:
    """What the supervisor needs of a ProcessSpec."""

    name: str
    role: Any
    num_threads: int = 1
    rank: int = 0
    num_ranks: int = 1

    def save(self, path: Path) -> None:
        path.write_text("{}")


class TinyLauncher(LocalLauncher):
    """Runs `python -c CODE` instead of the module: the code of a name, one per start."""

    def __init__(self, log_dir: Path, codes: dict[str, list[str]]) -> None:
        super().__init__(log_dir)
        self.codes, self.starts, self.awaited = codes, [], dict[str, str]()

    async def start(self, name, argv, environment):
        self.starts.append(name)
        codes = self.codes[name]
        return await super().start(name, ["-c", codes.pop(0) if len(codes) > 1 else codes[0]], environment)

    def awaits(self, name):
        return self.awaited.get(name, "")


class Watch:
    """A supervisor with a clock of its own."""

    def __init__(self, folder: Path, *codes: str, role: str = "rollout", max_restarts: int = 2) -> None:
        self.folder, self.now_s, self.hub = folder, 0.0, HubOfWords()
        self.launcher = TinyLauncher(folder, {"one": list(codes)})
        self.supervisor = Supervisor(
            self.launcher, self.hub, startup_timeout_s=30.0, silence_s=5.0, node_wait_s=100.0,  # type: ignore[arg-type]
        )  # fmt: skip
        spec: Any = Spec("one", role)
        self.supervisor.add(spec, folder / "one.json", max_restarts, 0.0)

    async def tick(self, seconds: float = 0.0) -> list[Loss]:
        self.now_s += seconds
        return await self.supervisor.tick(self.now_s)

    async def until_exit(self) -> list[Loss]:
        """Until the running process has ended and its exit was judged."""
        await until(lambda: not self.launcher.is_running("one"))
        assert await self.tick() == [], "last words are read before an exit is judged"
        return await self.tick(JUDGED_S)


def test_accident_within_the_budget_is_started_again_and_beyond_it_is_permanent(tmp_path):
    async def test():
        watch = Watch(tmp_path, "import sys; print('error: out of luck'); sys.exit(1)", max_restarts=1)
        await watch.tick()
        (loss,) = await watch.until_exit()
        assert (loss.name, loss.reason, loss.is_permanent) == ("one", "out of luck", False)
        await watch.tick(1.0)
        assert watch.launcher.starts == ["one", "one"]
        (loss,) = await watch.until_exit()
        assert loss.is_permanent
        assert not watch.supervisor.watches("one")
        error = watch.supervisor.died(loss)
        assert error.returncode == 1
        assert "out of luck" in error.tail
        assert await watch.tick(100.0) == []
        assert watch.launcher.starts == ["one", "one"]

    bounded(test())


def test_policy_that_diverged_is_reported_without_the_log(tmp_path):
    async def test():
        source = f"import sys; print('Traceback'); print('error: the policy has diverged'); sys.exit({DIVERGED})"
        watch = Watch(tmp_path, source, max_restarts=0)
        await watch.tick()
        (loss,) = await watch.until_exit()
        assert loss.is_divergence
        error = watch.supervisor.died(loss)
        assert str(error) == "the policy has diverged"
        assert not isinstance(error, ProcessDied)

    bounded(test())


def test_restarts_wait_longer_each_time(tmp_path):
    async def test():
        watch = Watch(tmp_path, "raise SystemExit(1)", max_restarts=9)
        for number, wait_s in enumerate((0.0, 1.0, 3.0, 10.0), start=1):
            await watch.tick()
            assert len(watch.launcher.starts) == number
            (loss,) = await watch.until_exit()
            assert not loss.is_permanent
            if wait_s:
                await watch.tick(wait_s - 0.1)
                assert len(watch.launcher.starts) == number
            watch.now_s += wait_s

    bounded(test())


def test_users_mistake_of_a_process_ends_the_run_with_its_own_words(tmp_path):
    async def test():
        code = "import sys; print('error: trainer.attention: no such kernel -> use sdpa'); sys.exit(2)"
        watch = Watch(tmp_path, code, role="trainer")
        await watch.tick()
        with pytest.raises(UserError, match="no such kernel -> use sdpa"):
            await watch.until_exit()

    bounded(test())


def test_leaving_unasked_with_status_zero_is_an_accident(tmp_path):
    async def test():
        watch = Watch(tmp_path, "pass", role="trainer", max_restarts=0)
        await watch.tick()
        watch.supervisor.reported("one")
        (loss,) = await watch.until_exit()
        assert (loss.reason, loss.is_permanent) == ("ended with status 0", True)

    bounded(test())


def test_released_process_ends_without_news_and_is_not_started_again(tmp_path):
    async def test():
        watch = Watch(tmp_path, "pass")
        await watch.tick()
        watch.supervisor.release("one")
        assert await watch.until_exit() == []
        await watch.tick(100.0)
        assert watch.launcher.starts == ["one"]

    bounded(test())


def test_process_released_between_its_exit_and_its_judgement_is_no_loss(tmp_path):
    async def test():
        watch = Watch(tmp_path, "pass", role="trainer", max_restarts=0)
        await watch.tick()
        await until(lambda: not watch.launcher.is_running("one"))
        assert await watch.tick() == []
        watch.supervisor.release("one")  # its Goodbye was read only now
        assert await watch.tick(JUDGED_S) == []

    bounded(test())


def test_silent_process_is_killed_lost_once_and_started_again(tmp_path):
    async def test():
        watch = Watch(tmp_path, SLEEP)
        await watch.tick()
        pid = watch.launcher.pid_of("one")
        watch.hub.silent_ones = ["one"]
        (loss,) = await watch.tick(6.0)
        assert loss.reason == "silent for 5 s"
        assert watch.hub.forgotten == ["one"]
        await until(lambda: not watch.launcher.is_running("one"))
        assert await watch.tick(0.1) == []
        assert await watch.tick(JUDGED_S) == []
        assert watch.launcher.starts == ["one", "one"]
        assert watch.launcher.pid_of("one") != pid
        await watch.launcher.stop_all(5.0)

    bounded(test())


@pytest.mark.parametrize("how", ["silent", "condemned", "never_reports"])
def test_killed_process_counts_as_ended_only_once_its_end_was_seen(tmp_path, how, monkeypatch):
    async def test():
        watch = Watch(tmp_path, SLEEP, max_restarts=0)
        kill, killed = watch.launcher.kill, []
        monkeypatch.setattr(watch.launcher, "kill", killed.append)  # the system needs a moment
        await watch.tick()
        if how == "silent":
            watch.hub.silent_ones = ["one"]
        elif how == "condemned":
            watch.supervisor.end("one", "it keeps its memory")
        (loss,) = await watch.tick(31.0)
        assert loss.may_live
        assert killed == ["one"]
        assert await watch.tick(1.0) == []
        assert watch.supervisor.take_ended() == [], "it may hold memory"
        kill("one")
        await until(lambda: not watch.launcher.is_running("one"))
        assert await watch.tick() == []
        assert await watch.tick(JUDGED_S) == []
        assert watch.supervisor.take_ended() == ["one"]
        assert watch.supervisor.take_ended() == []

    bounded(test())


def test_no_process_is_started_in_the_tick_that_reports_a_loss(tmp_path):
    """A successor that said Hello before the loss of its predecessor was handled would be taken for the lost one."""

    async def test():
        watch = Watch(tmp_path, "raise SystemExit(1)", SLEEP)
        await watch.tick()
        (loss,) = await watch.until_exit()
        assert not loss.is_permanent
        assert watch.launcher.starts == ["one"]
        assert await watch.tick() == []
        assert watch.launcher.starts == ["one", "one"]
        await watch.launcher.stop_all(5.0)

    bounded(test())


def test_process_that_said_goodbye_counts_as_ended_only_once_its_end_was_seen(tmp_path):
    async def test():
        watch = Watch(tmp_path, SLEEP)
        await watch.tick()
        watch.supervisor.release("one")
        assert await watch.tick(1.0) == []
        assert watch.supervisor.take_ended() == []
        watch.launcher.kill("one")
        await until(lambda: not watch.launcher.is_running("one"))
        await watch.tick()
        await watch.tick(JUDGED_S)
        assert watch.supervisor.take_ended() == ["one"]

    bounded(test())


def test_process_whose_own_exit_was_seen_is_lost_and_ended_at_once(tmp_path):
    async def test():
        watch = Watch(tmp_path, "raise SystemExit(1)", max_restarts=0)
        await watch.tick()
        (loss,) = await watch.until_exit()
        assert not loss.may_live
        assert watch.supervisor.take_ended() == ["one"]

    bounded(test())


def test_process_that_ended_and_is_silent_is_lost_once(tmp_path):
    async def test():
        watch = Watch(tmp_path, "raise SystemExit(1)", SLEEP)
        await watch.tick()
        await until(lambda: not watch.launcher.is_running("one"))
        watch.hub.silent_ones = ["one"]
        assert await watch.tick() == []
        assert len(await watch.tick(JUDGED_S)) == 1
        assert watch.supervisor.restarts == 1
        await watch.launcher.stop_all(5.0)

    bounded(test())


def test_process_that_never_says_hello_is_killed_and_lost(tmp_path):
    async def test():
        watch = Watch(tmp_path, SLEEP, max_restarts=0)
        await watch.tick()
        assert await watch.tick(29.0) == []
        (loss,) = await watch.tick(2.0)
        assert loss.is_permanent
        assert "no heartbeat within 30 s" in loss.reason
        await until(lambda: not watch.launcher.is_running("one"))

    bounded(test())


def test_process_out_of_reach_must_say_hello_again_in_time(tmp_path):
    async def test():
        watch = Watch(tmp_path, SLEEP, max_restarts=0)
        await watch.tick()
        watch.supervisor.reported("one")
        assert await watch.tick(100.0) == []
        watch.supervisor.lost_touch("one", watch.now_s)
        assert await watch.tick(29.0) == []
        watch.supervisor.reported("one")
        assert await watch.tick(100.0) == []
        watch.supervisor.lost_touch("one", watch.now_s)
        assert len(await watch.tick(31.0)) == 1
        await watch.launcher.stop_all(5.0)

    bounded(test())


def test_hub_forgets_the_dead_but_not_their_successors(tmp_path):
    async def test():
        watch = Watch(tmp_path, "raise SystemExit(1)")
        await watch.tick()
        watch.hub.peers["one"] = SimpleNamespace(pid=watch.launcher.pid_of("one"), heartbeat=None)
        await watch.until_exit()
        assert watch.hub.forgotten == ["one"]
        await watch.tick(1.0)
        watch.hub.peers["one"] = SimpleNamespace(pid=os.getpid(), heartbeat=None)
        await watch.until_exit()
        assert watch.hub.forgotten == ["one"]

    bounded(test())


def test_states_say_what_each_process_does(tmp_path):
    async def test():
        watch = Watch(tmp_path, "raise SystemExit(1)")
        assert watch.supervisor.states() == {"one": "starting"}
        await watch.tick()
        watch.hub.peers["one"] = SimpleNamespace(pid=1, heartbeat=SimpleNamespace(state="generate"))
        assert watch.supervisor.states() == {"one": "generate"}
        await watch.until_exit()
        assert watch.supervisor.states() in ({"one": "restarting (1 of 2)"}, {"one": "generate"})
        assert watch.supervisor.watches_role("rollout")
        assert not watch.supervisor.watches_role("trainer")
        await watch.launcher.stop_all(5.0)

    bounded(test())


def test_processes_are_reported_with_role_pid_incarnation_and_counters(tmp_path):
    async def test():
        watch = Watch(tmp_path, "import time; time.sleep(60)")
        await watch.tick()
        pid = watch.launcher.pid_of("one")
        (before,) = watch.supervisor.processes().items()
        assert before == ("one", ProcessNow("rollout", "starting", pid, rss_mb=before[1].rss_mb))
        heartbeat = SimpleNamespace(state="generate", counters={"tokens": 3.0})
        watch.hub.peers["one"] = SimpleNamespace(pid=pid, incarnation="abc", heartbeat=heartbeat)
        found = watch.supervisor.processes()["one"]
        assert found == ProcessNow("rollout", "generate", pid, "abc", {"tokens": 3.0}, found.rss_mb)
        await until(lambda: watch.supervisor.processes()["one"].row()["rss_mb"] > 1.0)  # one just born holds nothing
        await watch.launcher.stop_all(5.0)

    bounded(test())


class Group(Watch):
    """Two ranks of a trainer under one supervisor; `codes` of rank 0 and of rank 1."""

    def __init__(self, folder: Path, zero: list[str], one: list[str], max_restarts: int = 2) -> None:
        self.folder, self.now_s, self.hub = folder, 0.0, HubOfWords()
        self.launcher = TinyLauncher(folder, {"trainer": zero, "trainer-1": one})
        self.supervisor = Supervisor(
            self.launcher, self.hub, startup_timeout_s=30.0, silence_s=5.0, node_wait_s=100.0,  # type: ignore[arg-type]
        )  # fmt: skip
        for rank, name in enumerate(("trainer", "trainer-1")):
            spec: Any = Spec(name, "trainer", rank=rank, num_ranks=2)
            self.supervisor.add(spec, folder / f"{name}.json", max_restarts, 0.0)

    async def until_over(self, *names: str) -> list[Loss]:
        losses: list[Loss] = []
        await until(lambda: not any(self.launcher.is_running(name) for name in names))
        for _ in range(3):
            losses += await self.tick(JUDGED_S)
        return losses


ECHOING = "import sys; print('error: RankLost: the others are gone'); sys.exit(1)"


def test_ranks_start_again_together_once_it_is_said_from_where_and_count_as_one(tmp_path):
    async def test():
        group = Group(tmp_path, [SLEEP], ["raise SystemExit(7)", SLEEP])
        await group.tick()
        first = group.launcher.pid_of("trainer")
        (loss,) = await group.until_over("trainer-1")
        assert (loss.name, loss.reason, loss.is_permanent) == ("trainer-1", "ended with status 7", False)
        await until(lambda: not group.launcher.is_running("trainer"))
        assert await group.tick(10.0) == [], "that it was killed with the group is no loss"
        assert group.launcher.starts == ["trainer", "trainer-1"], "nobody has said from where"
        assert group.supervisor.states() == dict.fromkeys(("trainer", "trainer-1"), "restarting (1 of 2)")
        group.supervisor.renew(lambda spec: replace(spec, num_threads=3))
        assert await group.tick(1.0) == []
        assert group.launcher.starts == ["trainer", "trainer-1"] * 2
        assert group.launcher.pid_of("trainer") != first
        assert group.supervisor.restarts == 1
        await group.launcher.stop_all(5.0)

    bounded(test())


def test_rank_that_only_lost_the_others_is_not_the_reason_and_costs_nothing(tmp_path):
    async def test():
        group = Group(tmp_path, [ECHOING, SLEEP], ["import sys; print('error: out of memory'); sys.exit(1)", SLEEP])
        await group.tick()
        (loss,) = await group.until_over("trainer", "trainer-1")
        assert (loss.name, loss.reason) == ("trainer-1", "out of memory")
        assert group.supervisor.restarts == 1
        await group.launcher.stop_all(5.0)

    bounded(test())


def test_group_beyond_its_budget_is_gone_for_good(tmp_path):
    async def test():
        group = Group(tmp_path, [SLEEP], ["raise SystemExit(7)"], max_restarts=1)
        await group.tick()
        assert [loss.is_permanent for loss in await group.until_over("trainer-1")] == [False]
        await until(lambda: not group.launcher.is_running("trainer"))
        await group.tick(JUDGED_S)
        group.supervisor.renew(lambda spec: spec)
        await group.tick(1.0)
        assert [loss.is_permanent for loss in await group.until_over("trainer-1")] == [True]
        await group.launcher.stop_all(5.0)

    bounded(test())


def test_policy_that_diverged_is_not_tried_again(tmp_path):
    async def test():
        watch = Watch(tmp_path, f"import sys; print('error: diverged'); sys.exit({DIVERGED})", role="trainer")
        await watch.tick()
        (loss,) = await watch.until_exit()
        assert loss.is_permanent

    bounded(test())


def test_reason_of_a_second_death_is_not_read_from_the_first_ones_log(tmp_path):
    async def test():
        killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        watch = Watch(tmp_path, "import sys; print('error: out of luck'); sys.exit(1)", killed)
        await watch.tick()
        (loss,) = await watch.until_exit()
        assert loss.reason == "out of luck"
        await watch.tick(1.0)
        (loss,) = await watch.until_exit()
        assert loss.reason == "ended with signal SIGKILL"

    bounded(test())


def test_last_error_is_the_newest_error_line():
    assert last_error("error: old\nTraceback\nerror: new\nend") == "new"
    assert last_error("nothing of the kind") == ""


def test_process_that_announced_that_it_leaves_is_not_started_again(tmp_path):
    async def test():
        watch = Watch(tmp_path, "pass")
        await watch.tick()
        watch.supervisor.reported("one")
        assert not watch.supervisor.is_leaving("one")
        watch.supervisor.leaving("one", watch.now_s)
        assert watch.supervisor.is_leaving("one")
        (loss,) = await watch.until_exit()
        assert loss.is_permanent, "without a Goodbye it is reported as a loss, once"
        await watch.tick(100.0)
        assert watch.launcher.starts == ["one"]

    bounded(test())


def test_process_that_announced_and_does_not_leave_is_killed_in_time(tmp_path):
    async def test():
        watch = Watch(tmp_path, SLEEP)
        await watch.tick()
        watch.supervisor.reported("one")
        watch.supervisor.leaving("one", watch.now_s)
        assert await watch.tick(LEAVE_S - 1.0) == []
        (loss,) = await watch.tick(2.0)
        assert loss.is_permanent
        assert "did not exit" in loss.reason
        await until(lambda: not watch.launcher.is_running("one"))
        assert await watch.tick(JUDGED_S) == []
        assert watch.launcher.starts == ["one"]

    bounded(test())


SECONDARY_FAILURE = (
    "import sys; print('error: RankLost: the other ranks of the trainer were lost', file=sys.stderr); sys.exit(1)"
)


def ranks_of(watch: Watch, *codes: str) -> None:
    """A trainer of as many ranks as codes, in place of the one process of the watch."""
    watch.supervisor.release("one")
    for rank, code in enumerate(codes):
        name = f"trainer-{rank}" if rank else "trainer"
        watch.launcher.codes[name] = [code]
        spec: Any = Spec(name, "trainer", rank=rank, num_ranks=len(codes))
        watch.supervisor.add(spec, watch.folder / f"{name}.json", 0, 0.0)


def test_rank_that_died_is_judged_before_those_that_only_lost_it(tmp_path):
    async def test():
        watch = Watch(tmp_path, SLEEP)
        ranks_of(watch, SECONDARY_FAILURE, "import os; os.abort()", SECONDARY_FAILURE)
        await watch.tick()
        await until(lambda: not any(watch.launcher.is_running(name) for name in ("trainer", "trainer-1", "trainer-2")))
        assert await watch.tick() == []
        losses = await watch.tick(JUDGED_S)
        assert [loss.name for loss in losses] == ["trainer-1", "trainer", "trainer-2"]
        assert "SIGABRT" in losses[0].reason
        assert {loss.role for loss in losses} == {"trainer"}
        assert all(loss.is_permanent for loss in losses)

    bounded(test())


def test_drained_process_can_be_added_again_once_it_has_ended(tmp_path):
    async def test():
        watch = Watch(tmp_path, "pass", SLEEP)
        await watch.tick()
        watch.supervisor.release("one")
        assert "one" in watch.supervisor.names, "it still ends"
        await until(lambda: not watch.launcher.is_running("one"))
        await watch.tick()
        await watch.tick(JUDGED_S)
        assert watch.supervisor.names == []
        watch.supervisor.add(Spec("one", "rollout"), tmp_path / "one.json", 2, watch.now_s)  # type: ignore[arg-type]
        await watch.tick()
        assert watch.launcher.starts == ["one", "one"]
        await watch.launcher.stop_all(5.0)

    bounded(test())


def test_ranks_that_follow_need_no_hello_and_leave_with_the_first(tmp_path):
    async def test():
        watch = Watch(tmp_path, SLEEP)
        ranks_of(watch, SLEEP, "pass")
        await watch.tick()
        watch.supervisor.reported("trainer")
        assert watch.supervisor.states()["trainer-1"] == "following"
        watch.supervisor.release("trainer")
        await until(lambda: not watch.launcher.is_running("trainer-1"))
        assert await watch.tick(100.0) == []
        assert await watch.tick(JUDGED_S) == []
        assert not watch.supervisor.watches_role("trainer")
        watch.launcher.kill("trainer")

    bounded(test())


def test_wait_for_a_place_is_no_failed_start_and_is_said(tmp_path):
    """startup_timeout_s is 30 s here, launch.ray.node_wait_s 100 s."""

    async def test():
        watch = Watch(tmp_path, SLEEP, max_restarts=0)
        watch.launcher.awaited["one"] = "free resources on a node (CPU 1)"
        await watch.tick()
        assert await watch.tick(4.0) == []
        assert watch.supervisor.take_news() == [], "a moment is no news"
        for _ in range(9):
            assert await watch.tick(10.0) == []
        assert watch.supervisor.take_news() == [
            "one waits for free resources on a node (CPU 1), at most 100 s (launch.ray.node_wait_s)"
        ]
        assert watch.supervisor.states() == {"one": "waits for free resources on a node (CPU 1)"}
        assert watch.supervisor.is_pool_unplaced()
        watch.launcher.awaited.clear()
        assert await watch.tick(29.0) == [], "its start begins when it has its place"
        assert watch.supervisor.take_news() == ["one is placed"]
        assert not watch.supervisor.is_pool_unplaced()
        (loss,) = await watch.tick(31.0)
        assert "no heartbeat within 30 s" in loss.reason
        await watch.launcher.stop_all(5.0)

    bounded(test())


def test_place_that_never_comes_is_given_up_for_good_with_what_was_missing(tmp_path):
    async def test():
        watch = Watch(tmp_path, SLEEP, max_restarts=9)
        watch.launcher.awaited["one"] = "free resources on a node (CPU 1)"
        await watch.tick()
        await watch.tick()
        assert await watch.tick(99.0) == []
        (loss,) = await watch.tick(2.0)
        assert loss.is_permanent
        assert loss.reason == "waited 100 s for free resources on a node (CPU 1) (launch.ray.node_wait_s)"
        assert not watch.supervisor.watches("one")
        assert not watch.supervisor.is_pool_unplaced()
        await watch.launcher.stop_all(5.0)

    bounded(test())


def test_ranks_start_only_when_none_of_the_old_ones_is_left(tmp_path):
    async def test():
        group = Group(tmp_path, [SLEEP], ["raise SystemExit(7)", SLEEP])
        group.launcher.kill = lambda name: None  # type: ignore[method-assign]  # the kernel holds on to it
        await group.tick()
        (loss,) = await group.until_over("trainer-1")
        assert loss.name == "trainer-1"
        assert group.supervisor.living("trainer") == ["trainer"]
        group.supervisor.renew(lambda spec: spec)
        for _ in range(3):
            await group.tick(10.0)
        assert group.launcher.starts == ["trainer", "trainer-1"]
        del group.launcher.kill
        group.launcher.kill("trainer")
        await until(lambda: not group.supervisor.living("trainer"))
        await group.tick(JUDGED_S)
        await group.tick(JUDGED_S)
        assert group.launcher.starts == ["trainer", "trainer-1"] * 2
        await group.launcher.stop_all(5.0)

    bounded(test())
