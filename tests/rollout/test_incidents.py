"""What breaks inside a worker and is repaired there reaches the controller."""

from __future__ import annotations

from areal_like.wire import messages as m
from rollout.incidents import Incidents


def test_each_is_taken_once_and_of_too_many_the_newest_hundred_stay():
    incidents = Incidents()
    for number in range(103):
        incidents.add(str(number))
    assert incidents.take() == [str(number) for number in range(3, 103)]
    assert incidents.take() == []
    assert incidents.count == 103


def test_the_controller_hears_of_those_before_and_after_the_connection_in_order(rig):
    async def scenario(r):
        r.incidents.add("the server died")
        await r.ready(version=None)
        await r.until(lambda: r.got(m.Incident), "Incident")
        r.incidents.add("the server died again")
        await r.until(lambda: len(r.got(m.Incident)) == 2, "second Incident")
        assert [message.text for message in r.got(m.Incident)] == ["the server died", "the server died again"]
        await r.until(lambda: r.beat().counters.get("incidents") == 2.0, "the count in a heartbeat")

    rig(scenario)
