"""Reward services that stand alone: several runs share one, several share the work, one of them dies or ends."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_harness import PATIENCE_S
from standing_harness import Standing, command, connected, task, until

pytestmark = pytest.mark.processes

SETTINGS: dict[str, Any] = {
    "scorers": [{"kind": "scorer_zoo:score"}],
    "num_workers": 2,
    "num_spares": 0,
    "cache_mb": 0,
    "drain_s": 20.0,
}


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Callable[..., Standing]]:
    """stand(settings, *arguments) starts a service; all are ended."""
    started: list[Standing] = []

    def start(settings: dict[str, Any] | None = None, *arguments: str, **more: Any) -> Standing:
        more.setdefault("name", f"reward-{len(started)}")
        started.append(Standing(tmp_path, {**SETTINGS, **(settings or {})}, *arguments, **more))
        return started[-1]

    yield start
    for service in started:
        service.close()


def test_two_runs_with_workers_of_one_name_share_a_service(stand: Callable[..., Standing]) -> None:
    service = stand()

    async def scene() -> None:
        async with connected([service.address], run="a") as one, connected([service.address], run="b") as other:
            asked = [client.score(task("length"), "x" * n, "stop", 1) for n in range(20) for client in (one, other)]
            verdicts = await asyncio.gather(*asked)
            assert [verdict.value for verdict in verdicts] == [float(n) for n in range(20) for _ in range(2)]
            (scorer,) = {verdict.scorer for verdict in verdicts}
            assert scorer.startswith("scorer_zoo:score@user-"), "the digest of its file is its version"

    asyncio.run(scene())
    assert service.stats().counters["scored"] == 40


def test_a_service_killed_in_mid_run_costs_no_verdict_and_none_comes_twice(stand: Callable[..., Standing]) -> None:
    services = [stand(), stand()]

    async def scene() -> None:
        async with connected([service.address for service in services], max_in_flight=24) as client:
            done: list[float] = []

            async def ask(number: int) -> None:
                verdict = await client.score(task("slow", seconds=0.02), str(number), "stop", 1)
                assert verdict.is_scored, verdict
                done.append(number)

            asked = [asyncio.create_task(ask(number)) for number in range(120)]
            await until(lambda: len(done) >= 30)
            assert all(link.pending for link in client._links), "both were asked"
            services[0].kill()
            await asyncio.gather(*asked)
            assert sorted(done) == list(range(120))
            assert client.counters["verdict_scored"] == 120
            assert client.counters["score_moved"] > 0
            assert client.num_outstanding == 0

    asyncio.run(scene())


def test_a_draining_service_finishes_what_runs_sends_the_rest_elsewhere_and_exits_in_order(
    stand: Callable[..., Standing],
) -> None:
    services = [stand(), stand()]

    async def scene() -> None:
        async with connected([service.address for service in services]) as client:
            asked = [
                asyncio.create_task(client.score(task("slow", seconds=0.2), "x", "stop", 1)) for _ in range(8)
            ]  # fmt: skip
            await until(lambda: all(link.pending for link in client._links))
            services[0].process.send_signal(signal.SIGTERM)
            await until(lambda: client._links[0].is_draining)
            late = [client.score(task("length"), "x", "stop", 1) for _ in range(20)]
            assert all(verdict.is_scored for verdict in await asyncio.gather(*asked, *late))
            assert client.counters.get("stray_verdicts", 0) == 0, "nothing was scored twice"

    asyncio.run(scene())
    assert services[0].process.wait(PATIENCE_S) == 0, services[0].log
    assert services[1].stats().counters["scored"] >= 20


def test_a_drain_that_runs_out_of_time_sends_its_questions_to_the_other(stand: Callable[..., Standing]) -> None:
    services = [stand({"drain_s": 0.1}), stand()]

    async def scene() -> None:
        async with connected([services[0].address]) as client:
            hanging = asyncio.create_task(client.score(task("slow", seconds=30.0), "x", "stop", 1))
            waiting = asyncio.create_task(client.score(task("length"), "four", "stop", 1))
            assert (await waiting).value == 4.0
            services[0].process.send_signal(signal.SIGTERM)
            await until(lambda: client.counters.get("score_refused_draining"))
            assert not hanging.done()
            hanging.cancel()

    asyncio.run(scene())
    assert services[0].process.wait(PATIENCE_S) == 0, services[0].log


def test_a_full_service_refuses_and_the_client_asks_again_until_all_are_scored(stand: Callable[..., Standing]) -> None:
    service = stand({"max_queue": 3})

    async def scene() -> None:
        async with connected([service.address]) as client:
            asked = [client.score(task("slow", seconds=0.01), "x", "stop", 1) for _ in range(80)]
            assert all(verdict.is_scored for verdict in await asyncio.gather(*asked))
            assert client.counters["score_refused_full"] > 0

    asyncio.run(scene())
    counters = service.stats().counters
    assert counters["refused_full"] > 0
    assert (counters["scored"], counters.get("duplicates", 0)) == (80, 0)


def test_a_service_is_asked_for_one_of_its_scorers(stand: Callable[..., Standing]) -> None:
    service = stand(
        {"scorers": [{"kind": "scorer_zoo:score"}, {"kind": "format", "weight": 10.0, "options": {"must_stop": True}}]}
    )

    async def scene() -> None:
        async with connected([service.address], scorer="scorer_zoo:score") as client:
            assert (await client.score(task("length"), "four", "stop", 1)).value == 4.0
        async with connected([service.address], scorer="judge") as client:
            verdict = await client.score(task("length"), "four", "stop", 1)
            assert (verdict.kind, "judge" in verdict.reason) == ("invalid", True)

    asyncio.run(scene())


def test_duplicates_are_scored_once_and_never_for_a_scorer_that_is_not_deterministic(
    stand: Callable[..., Standing], tmp_path: Path
) -> None:
    notes = [tmp_path / name for name in ("kept", "fresh")]
    service = stand({"scorers": [{"kind": "scorer_zoo:score"}, {"kind": "scorer_zoo:drawn"}], "cache_mb": 1.0})

    async def scene() -> None:
        for note, scorer in zip(notes, ("scorer_zoo:score", "scorer_zoo:drawn"), strict=True):
            note.touch()
            async with connected([service.address], scorer=scorer) as client:
                for _ in range(3):
                    verdict = await client.score(task("length", note=str(note)), "four", "stop", 1)
                    assert verdict.value == 4.0
        async with connected([service.address]) as client:
            assert (await client.score(task("length"), "four", "stop", 1)).attempts == 1
            assert (await client.score(task("length"), "four", "stop", 1)).attempts == 1, "a part of it is drawn"

    asyncio.run(scene())
    assert [len(note.read_text().split()) for note in notes] == [1, 3]
    assert service.stats().counters["cache.hits"] == 2


def test_status_shows_health_and_statistics_and_fails_where_nobody_answers(stand: Callable[..., Standing]) -> None:
    service = stand()

    async def scene() -> None:
        async with connected([service.address]) as client:
            for do in ("length", "nan", "raise"):
                await client.score(task(do), "four", "stop", 1)

    asyncio.run(scene())
    shown = command("status", service.address, "--timeout-s", "250")
    assert shown.returncode == 0, shown.stderr
    for words in ("wait:request", "1 scored", "1 crashed", "1 invalid", "scorer_zoo:score@user", "p95"):
        assert words in shown.stdout
    found = json.loads(command("status", "--json", service.address, "--timeout-s", "250").stdout)
    assert found["counters"]["scorer.scorer_zoo:score.answers"] == 4, "a crash is tried twice"
    assert found["state"] == "wait:request"
    service.kill()
    gone = command("status", service.address, "--timeout-s", "0.5")
    assert gone.returncode == 1
    assert "unreachable" in gone.stdout


def test_only_holders_of_the_keys_are_served(stand: Callable[..., Standing], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert command("keys", str(keys)).returncode == 0
    assert command("keys", str(keys)).returncode == 2, "keys in use are not overwritten"
    service = stand(None, "--curve-dir", str(keys))

    async def scene() -> None:
        async with connected([service.address], curve_dir=keys) as client:
            assert (await client.score(task("length"), "four", "stop", 1)).value == 4.0

    asyncio.run(scene())
    assert command("status", service.address, "--curve-dir", str(keys)).returncode == 0
    assert command("status", service.address, "--timeout-s", "0.5").returncode == 1


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ({"num_wrokers": 2}, (), ["reward.num_wrokers", "did you mean num_workers?"]),
        ({"timeout_s": -1}, (), ["reward.timeout_s", "greater than 0"]),
        ({"addresses": ["tcp://127.0.0.1:1"]}, (), ["reward.addresses", "remove this key"]),
        ({"scorers": [{"kind": "mth"}]}, (), ["mth", "did you mean math?"]),
        ({}, ("--bind", "127.0.0.1:0"), ["invalid address", "tcp://host:port"]),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(
    tmp_path: Path, settings: dict[str, Any], arguments: tuple[str, ...], words: list[str]
) -> None:
    config = tmp_path / "rewards.yaml"
    config.write_text(json.dumps({"reward": {"scorers": [{"kind": "running_sum"}], **settings}}))
    ended = command("serve", "--config", str(config), *arguments)
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert all(word in last for word in words), last
