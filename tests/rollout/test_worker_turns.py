"""Claims about versions a worker receives itself and holds until its turn: it goes on with the old one meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from areal_like.errors import WeightError
from areal_like.wire import messages as m


class FakeReceiver:
    """Puts a zero before the number; `fails` names places that cannot be received, and from "dead" nothing comes."""

    def __init__(self, fails=()):
        self.asked, self.fails, self.forgotten, self.is_closed = [], fails, 0, False
        self.num_waiting = 0

    async def receive(self, place, deadline_s):
        self.asked.append((Path(place).name, deadline_s))
        if Path(place).name in self.fails:
            raise WeightError("the transfer broke")
        if Path(place).name == "dead":
            self.num_waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.num_waiting -= 1
        return Path(place).with_name(Path(place).name.replace("v", "v0"))

    async def run(self):
        pass

    def forget(self):
        self.forgotten += 1

    def counters(self):
        return {"weights_received_bytes": 7.0}

    async def close(self):
        self.is_closed = True


@pytest.fixture
def receiver(rig, monkeypatch):
    """A worker with a receiver of its own: `with_receiver(scenario, fails=...)`."""
    from rollout import worker

    def run(scenario, fails=(), **settings):
        made = FakeReceiver(fails)
        usual = worker.VersionLoader

        def loader(**arguments):
            return usual(**{**arguments, "receiver": made})

        monkeypatch.setattr(worker, "VersionLoader", loader)

        async def with_it(r):
            await scenario(r, made)

        rig(with_it, **settings)

    return run


def test_the_engine_loads_what_was_received(receiver):
    async def scenario(r, received):
        await r.ready(version=0)
        assert r.engine.loads == ["v00"]
        assert received.asked == [("v0", 120.0)]
        await r.until(lambda: r.beat().counters.get("weights_received_bytes") == 7.0, "counters")

    receiver(scenario)


def test_a_transfer_that_fails_is_reported_and_the_old_version_goes_on(receiver):
    async def scenario(r, received):
        await r.ready(version=0)
        r.announce(1)
        await r.until(lambda: r.got(m.VersionFailed), "VersionFailed")
        assert r.got(m.VersionFailed)[0].reason == "the transfer broke"
        assert r.engine.version == 0
        assert r.engine.loads == ["v00"]

    receiver(scenario, fails=("v1",))


def test_what_the_engine_refuses_is_no_base_for_the_next(receiver):
    async def scenario(r, received):
        await r.ready(version=0)
        r.announce(1, name="bad1")
        await r.until(lambda: r.got(m.VersionFailed), "VersionFailed")
        assert received.forgotten == 1

    receiver(scenario)


def test_a_held_version_is_received_at_once_and_swapped_on_request(receiver, fake):
    async def scenario(r, received):
        await r.ready(version=0)
        r.engine.allow(3)
        r.lease(fake.task(1))
        await r.until(lambda: r.engine.num_tokens == 3, "tokens")
        r.announce(1, is_held=True)
        await r.until(lambda: r.got(m.VersionStaged), "VersionStaged")
        assert received.asked[-1][0] == "v1"
        r.engine.allow(5)
        await r.until(lambda: r.engine.num_tokens == 5, "tokens go on meanwhile")
        assert r.engine.version == 0
        r.send(m.SwapVersion(version=1, lineage="l0"))
        await r.until(lambda: r.engine.version == 1, "swap")
        r.engine.allow(100)
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        assert r.got(m.SampleFinished)[0].trajectory.versions_T[2:].tolist() == [0, 0, 0, 0, 0, 1]

    receiver(scenario)


def test_a_newer_version_replaces_one_that_waits_for_its_turn(receiver):
    async def scenario(r, received):
        await r.ready(version=0)
        r.announce(1, is_held=True)
        await r.until(lambda: r.got(m.VersionStaged), "VersionStaged")
        r.announce(2, is_held=True)
        await r.until(lambda: len(r.got(m.VersionStaged)) == 2, "the newer one")
        r.send(m.SwapVersion(version=1, lineage="l0"))  # crossed on the way
        r.send(m.SwapVersion(version=2, lineage="l0"))
        await r.until(lambda: r.engine.version == 2, "swap")
        assert r.engine.loads == ["v00", "v02"]

    receiver(scenario)


def test_announced_again_while_it_waits_it_says_again_that_it_has_staged(receiver):
    async def scenario(r, received):
        await r.ready(version=0)
        r.announce(1, is_held=True)
        await r.until(lambda: r.got(m.VersionStaged), "VersionStaged")
        r.announce(1, is_held=True)
        await r.until(lambda: len(r.got(m.VersionStaged)) == 2, "again")
        assert [name for name, _ in received.asked] == ["v0", "v1"]
        r.announce(1)
        await r.until(lambda: r.engine.version == 1, "asked to load it without a turn")

    receiver(scenario)


def test_a_version_whose_trainer_is_gone_is_given_up_for_the_next_ones(receiver):
    async def scenario(r, received):
        await r.ready(version=0)
        r.announce(1, name="dead")
        await r.until(lambda: received.asked[-1][0] == "dead", "waiting for a trainer that died")
        r.announce(2, lineage="l1")
        await r.until(lambda: r.engine.loads == ["v00", "v02"], "the successor's version")
        assert received.num_waiting == 0, "the fetch was ended, not left to its deadline"
        assert not r.got(m.VersionFailed), "nothing is wrong with this worker"

    receiver(scenario)
