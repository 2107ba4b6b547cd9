"""Claims about keeping reward models' processes up: which start, what is awaited, how often, and what stays behind."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import OperationError, UserError
from services.reward import model_hosts
from services.reward.config import RewardSettings
from services.reward.model_host import status, write_status
from services.reward.model_hosts import ModelHosts
from services.reward.scorer_options import RewardModelOptions

LIMIT_S = 300.0


class FakeProcess:
    """A model's process; `dies` is its exit status, None while it runs."""

    numbers = itertools.count(100)

    def __init__(self) -> None:
        self.pid = next(FakeProcess.numbers)
        self.returncode: int | None = None
        self.dies: int | None = None
        self.was_killed = False
        self.never_ends = False

    def poll(self) -> int | None:
        self.returncode = self.dies
        return self.returncode

    def kill(self) -> None:
        self.was_killed = True

    def wait(self, timeout_s: float) -> int:
        if self.never_ends:
            raise subprocess.TimeoutExpired("model_host", timeout_s)
        self.returncode = -9
        return -9


class Starts:
    """Replaces the start of processes: what each start does to its options and its process."""

    def __init__(self, *acts: Callable[[RewardModelOptions, FakeProcess], None]) -> None:
        self.acts = list(acts)
        self.made: list[tuple[RewardModelOptions, FakeProcess]] = []

    def __call__(self, options: RewardModelOptions) -> FakeProcess:
        process = FakeProcess()
        assert options.socket is not None
        status(options.socket).unlink(missing_ok=True)
        self.made.append((options, process))
        act = self.acts[min(len(self.made), len(self.acts)) - 1]
        act(options, process)
        return process


def ready(options: RewardModelOptions, process: FakeProcess) -> None:
    write_status(options.socket or "", "")


def refusing(options: RewardModelOptions, process: FakeProcess) -> None:
    write_status(options.socket or "", "the folder is empty")


def dying(options: RewardModelOptions, process: FakeProcess) -> None:
    process.dies = 3


def ready_then_dead(options: RewardModelOptions, process: FakeProcess) -> None:
    ready(options, process)
    process.dies = -11


def silent(options: RewardModelOptions, process: FakeProcess) -> None:
    """Neither says that it is ready nor ends."""


MODEL = {"kind": "reward_model", "options": {"path": "m"}}


def hosts_of(starts: Starts, monkeypatch: pytest.MonkeyPatch, *scorers: dict[str, Any]) -> ModelHosts:
    monkeypatch.setattr(model_hosts, "_spawned", starts)
    monkeypatch.setattr(model_hosts, "WATCH_S", 0.0)
    monkeypatch.setattr(model_hosts, "START_POLL_S", 0.0)
    return ModelHosts(RewardSettings.model_validate({"scorers": list(scorers or (MODEL,))}))


def test_each_reward_model_gets_a_socket_of_its_own_and_other_scorers_none(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"kind": "reward_model", "options": {"path": "n", "socket": "/given"}}
    third = {"kind": "reward_model", "options": {"path": "o"}}
    starts = Starts(ready)
    hosts = hosts_of(starts, monkeypatch, {"kind": "math"}, MODEL, other, third)
    sockets = [scorer.options.get("socket") for scorer in hosts.settings.scorers]
    assert sockets[0] is None
    assert sockets[2] == "/given", "somebody else runs that one"
    assert len({sockets[1], sockets[3]}) == 2
    folder = Path(sockets[1] or "").parent
    assert folder.stat().st_mode & 0o777 == 0o700
    asyncio.run(hosts.start())
    assert [(options.path, options.socket) for options, _ in starts.made] == [("m", sockets[1]), ("o", sockets[3])]
    hosts.close()
    assert not folder.exists()


def test_without_a_reward_model_nothing_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hosts = hosts_of(Starts(ready), monkeypatch, {"kind": "math"})
    asyncio.run(hosts.start())
    hosts.close()
    assert not list(tmp_path.iterdir())
    assert hosts.pids == set()


def test_bad_options_are_left_to_the_scorer_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(ready)
    hosts = hosts_of(starts, monkeypatch, {"kind": "reward_model", "options": {"path": ""}})
    asyncio.run(hosts.start())
    assert not starts.made
    hosts.close()


def test_start_waits_until_every_model_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(ready, silent)
    second = {"kind": "reward_model", "options": {"path": "n"}}
    hosts = hosts_of(starts, monkeypatch, MODEL, second)

    async def work() -> None:
        starting = asyncio.create_task(hosts.start())
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(starts.made) == 2, "they load at the same time"
        assert not starting.done()
        ready(*starts.made[1])
        await asyncio.wait_for(starting, LIMIT_S)

    asyncio.run(work())
    assert hosts.pids == {process.pid for _, process in starts.made}
    starts.made[0][1].dies = 1
    starts.made[0][1].poll()
    assert hosts.pids == {starts.made[1][1].pid}, "a reaped process's number may be another's"
    hosts.close()


@pytest.mark.parametrize(
    ("act", "start_timeout_s", "words"),
    [
        (refusing, 600.0, "the folder is empty"),
        (dying, 600.0, "the process of the model ended with status 3 while loading the model"),
        (silent, 0.0, "the model could not be loaded within 0 s"),
    ],
)
def test_a_model_that_does_not_come_up_is_the_users_mistake(
    act: Any, start_timeout_s: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = hosts_of(Starts(act), monkeypatch)
    monkeypatch.setattr(model_hosts, "START_TIMEOUT_S", start_timeout_s)
    with pytest.raises(UserError, match=words):
        asyncio.run(asyncio.wait_for(hosts.start(), LIMIT_S))
    hosts.close()


def test_a_process_that_says_why_and_ends_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_and_end(options: RewardModelOptions, process: FakeProcess) -> None:
        refusing(options, process)
        process.dies = 2

    hosts = hosts_of(Starts(refuse_and_end), monkeypatch)
    with pytest.raises(UserError, match="the folder is empty"):
        asyncio.run(hosts.start())
    hosts.close()


def test_a_process_that_died_is_started_again_and_the_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(ready)
    second = {"kind": "reward_model", "options": {"path": "n"}}
    hosts = hosts_of(starts, monkeypatch, MODEL, second)

    async def work() -> None:
        await hosts.start()
        starts.made[1][1].dies = -9
        running = asyncio.create_task(hosts.run())
        async with asyncio.timeout(LIMIT_S):
            while len(starts.made) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(work())
    assert [options.path for options, _ in starts.made] == ["m", "n", "n"]
    assert hosts.num_restarts == 1
    assert hosts.pids == {starts.made[0][1].pid, starts.made[2][1].pid}
    hosts.close()


def test_a_process_that_exits_repeatedly_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(ready_then_dead)
    hosts = hosts_of(starts, monkeypatch)

    async def work() -> None:
        await hosts.start()
        await asyncio.wait_for(hosts.run(), LIMIT_S)

    with pytest.raises(
        OperationError, match="processes of reward models exited more than 5 times; the last one is that of m"
    ):
        asyncio.run(work())
    assert len(starts.made) == 1 + model_hosts.MAX_RESTARTS
    hosts.close()


def test_a_restart_that_is_refused_is_no_mistake_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = hosts_of(Starts(ready_then_dead, refusing), monkeypatch)

    async def work() -> None:
        await hosts.start()
        await asyncio.wait_for(hosts.run(), LIMIT_S)

    with pytest.raises(OperationError, match="the folder is empty") as raised:
        asyncio.run(work())
    assert not isinstance(raised.value, UserError)
    hosts.close()


def test_close_kills_and_reaps_all_even_if_one_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(ready)
    second = {"kind": "reward_model", "options": {"path": "n"}}
    hosts = hosts_of(starts, monkeypatch, MODEL, second)
    asyncio.run(hosts.start())
    starts.made[0][1].never_ends = True
    hosts.close()
    assert [process.was_killed for _, process in starts.made] == [True, True]
    assert starts.made[1][1].returncode == -9


def test_process_is_started_for_these_options_and_its_old_word_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RewardModelOptions(path="m", socket=str(tmp_path / "s"))
    write_status(str(tmp_path / "s"), "")
    commands: list[tuple[list[str], dict[str, Any]]] = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **more: commands.append((command, more)))
    monkeypatch.setattr("os.getpid", lambda: 42)
    model_hosts._spawned(options)
    assert not status(str(tmp_path / "s")).exists()
    ((command, more),) = commands
    assert command[-5:-4] == ["services.reward.model_host"]
    assert RewardModelOptions.model_validate_json(command[command.index("--options") + 1]) == options
    assert command[-2:] == ["--service-pid", "42"]
    assert more["start_new_session"], "a Ctrl-C at the terminal is the service's to handle"
