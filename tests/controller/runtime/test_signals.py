"""SIGINT and SIGTERM while a job is prepared, and after its server has taken over."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from small_run import bounded, until

from controller.runtime.signals import Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_preparation_cancels_it(number: signal.Signals) -> None:
    ended: list[str] = []

    async def work() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        return "done"

    async def test() -> None:
        said: list[str] = []
        with Signals() as signals:
            signals.say = said.append
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
            assert await signals.unless_asked(work()) is None
            assert ended == ["cancelled"]
        assert said == [f"{number.name}: stopping"]

    bounded(test())


def test_preparation_that_ends_in_time_gives_its_result_or_its_error() -> None:
    async def good() -> str:
        return "done"

    async def bad() -> str:
        raise ValueError("no such file")

    async def test() -> None:
        with Signals() as signals:
            assert await signals.unless_asked(good()) == "done"
            with pytest.raises(ValueError, match="no such file"):
                await signals.unless_asked(bad())
            await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) == 1, "nobody waits for a signal any more"

    bounded(test())


def test_signals_go_to_the_server_once_it_has_taken_over_with_one_that_came_before() -> None:
    async def test() -> None:
        received: list[str] = []
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            await signals.unless_asked(asyncio.Event().wait())
            signals.hand_to(received.append)
            assert received == ["a signal"]
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
                await until(lambda name=number.name: received[-1] == name)  # type: ignore[misc]
            assert received == ["a signal", "SIGTERM", "SIGINT"]

    bounded(test())


def test_nothing_is_handed_over_where_no_signal_came_and_both_handlers_go_at_the_end() -> None:
    async def test() -> None:
        received: list[str] = []
        with Signals() as signals:
            signals.hand_to(received.append)
            assert received == []
        loop = asyncio.get_running_loop()
        assert [loop.remove_signal_handler(number) for number in (signal.SIGINT, signal.SIGTERM)] == [False, False]

    bounded(test())
