"""The environment `openenv`: a real server (skipped where the package is not installed), and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from ecosystem import REPOSITORY, interpreter_of
from local_server import listening

from areal_like.environment import InvalidStep, Step, as_step
from areal_like.errors import UserError
from services.environment.adapters import openenv
from services.environment.adapters.openenv import OpenEnvEnvironment, OpenEnvFailed

SERVER = REPOSITORY / "configs" / "environments" / "openenv_guess_number.py"
GUESS = {"action_field": "number", "observation_field": "text", "correct_at": 0.1}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    python = interpreter_of("openenv")
    with listening(lambda port: [python, str(SERVER), str(port)]) as port:
        yield f"http://127.0.0.1:{port}"


async def close_session() -> None:
    session = openenv._SESSIONS.get(asyncio.get_running_loop())
    if session is not None:
        await session.close()


def run(scene: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        async with asyncio.timeout(300.0):
            try:
                return await scene()
            finally:
                await close_session()

    return asyncio.run(whole())


async def guessed(url: str, seed: int, size: int) -> tuple[str, Step, int]:
    """Halve what is left until the number is found: what was said first and last, and the number."""
    environment = OpenEnvEnvironment(url=url, **GUESS, reset_columns=["size"])  # type: ignore[arg-type]
    first = as_step(await environment.reset({"size": size}, seed), is_reset=True, max_bytes=1000)
    low, high = 0, size - 1
    while True:
        middle = (low + high) // 2
        step = as_step(await environment.step(f" {middle}\n"), is_reset=False, max_bytes=1000)
        if step.is_done:
            await environment.close()
            return first.observation, step, middle
        assert step.reward == pytest.approx(0.02)
        low, high = (middle + 1, high) if "greater" in step.observation else (low, middle - 1)


@pytest.mark.processes
def test_sessions_of_a_real_server_are_apart_and_a_seed_begins_them_alike(address: str) -> None:
    async def scene() -> Any:
        return await asyncio.gather(*(guessed(address, seed, 100) for seed in (1, 2, 3, 1, 2**40 + 1)))

    found = run(scene)
    assert {first for first, _, _ in found} == {"A number from 0 to 99. "}
    assert found[0] == found[3] == found[4], "the seed is taken modulo 2**31"
    assert len({number for _, _, number in found}) > 1
    assert all(step.components == {"correct": 1.0, "invalid_actions": 0.0} for _, step, _ in found)

    async def odd() -> Any:
        written = OpenEnvEnvironment(url=f"{address}/ws", action={"number": 4}, reset={"size": 9})
        first = await written.reset({}, 1)
        steps = [await written.step(text) for text in ('{"numbr": 3}', "four", "[4]", "", "{}")]
        await written.close()
        return first, steps

    first, steps = run(odd)
    assert json.loads(first.observation) == {"text": "A number from 0 to 8. ", "metadata": {}}
    assert [step.observation.partition(" (")[0] for step in steps[1:4]] == [
        "The action is not JSON", "The action is not a JSON object.", "There is no action.",
    ]  # fmt: skip
    assert steps[0].observation == "The action is not valid: numbr: Extra inputs are not permitted"
    assert [step.reward for step in steps[:4]] == [0.0] * 4
    assert steps[4].components == {"invalid_actions": 4.0}
    assert "text" in json.loads(steps[4].observation)


Answer = Callable[[dict[str, Any]], Any]


def against(answer: Answer, scene: Callable[[OpenEnvEnvironment], Awaitable[Any]], **options: Any) -> Any:
    """Play against a server that answers each message so: text, a value that is written as JSON, None: it hangs up."""

    async def serve(request: web.Request) -> web.WebSocketResponse:
        channel = web.WebSocketResponse()
        await channel.prepare(request)
        async for message in channel:
            if message.type is not WSMsgType.TEXT or (said := answer(json.loads(message.data))) is None:
                break
            await channel.send_str(said if isinstance(said, str) else json.dumps(said))
        await channel.close()
        return channel

    async def whole() -> Any:
        application = web.Application()
        application.router.add_get("/ws", serve)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await scene(OpenEnvEnvironment(url=f"http://127.0.0.1:{runner.addresses[0][1]}", **options))
        finally:
            await close_session()
            await runner.cleanup()

    return run(whole)


def observed(**data: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": "x"}, **data}}


async def one_step(environment: OpenEnvEnvironment) -> Step:
    as_step(await environment.reset({}, 1), is_reset=True, max_bytes=100)
    return as_step(await environment.step("1"), is_reset=False, max_bytes=100)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (observed(reward=1.0, done="yes"), "its `done` is not true or false but str"),
        (observed(reward="much", done=False), "its reward is not a finite number but much"),
        (observed(reward=None, done=True), "its reward is not a finite number but None"),
        (observed(reward=float("nan"), done=False), "its reward is not a finite number but nan"),
        (observed(reward=1.0, done=False, observation={"text": "y" * 200}), "its observation has 200 bytes"),
        (
            observed(reward=1.0, done=False, observation={"txt": "y"}),
            "the observation has no field text; its fields: txt",
        ),
        (observed(reward=1.0, done=False, observation="y"), "the observation has no field text; its fields: none"),
        ({"type": "error", "data": {"message": "boom\nhere", "code": "EXECUTION_ERROR"}}, "step: boom here"),
        ({"type": "error", "data": {}}, "step: an error without a message"),
        ({"type": "state", "data": {}}, "step: the server's reply cannot be read"),
        ({"type": "observation", "data": 3}, "step: the server's reply cannot be read"),
        ("[" * 100_000, "step: the server's reply cannot be read"),
        ("no JSON", "step: the server's reply cannot be read"),
        (None, "step: the server has closed the session"),
    ],
)  # fmt: skip
def test_a_server_that_misbehaves_is_a_failure_and_never_a_reward(step: Any, words: str) -> None:
    def answer(message: dict[str, Any]) -> Any:
        return observed(reward=None, done=False) if message["type"] == "reset" else step

    with pytest.raises((InvalidStep, OpenEnvFailed)) as caught:
        against(answer, one_step, action_field="number", observation_field="text")
    assert words in str(caught.value)


def test_steps_without_a_reward_are_worth_nothing_where_the_episode_has_one() -> None:
    rewards = iter([None, True, None])

    def answer(message: dict[str, Any]) -> Any:
        is_reset = message["type"] == "reset"
        return observed(done=False) if is_reset else observed(reward=next(rewards), done=False)

    async def scene(environment: OpenEnvEnvironment) -> list[Step]:
        await environment.reset({}, 1)
        steps = [await environment.step("1") for _ in range(3)]
        return [as_step(one, is_reset=False, max_bytes=100) for one in steps]

    assert [step.reward for step in against(answer, scene, action_field="a", correct_at=1.0)] == [0.0, 1.0, 0.0]


def test_a_server_without_room_is_asked_again() -> None:
    tries = []

    def answer(message: dict[str, Any]) -> Any:
        tries.append(message["data"])
        full = {"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}
        return full if len(tries) < 3 else observed(reward=0.0, done=False)

    async def scene(environment: OpenEnvEnvironment) -> Step:
        return await environment.reset({"task_id": 7, "other": 1}, 5)

    options = {"reset": {"task_id": 1, "level": 2}, "reset_columns": ["task_id"], "observation_field": "text"}
    assert against(answer, scene, **options).observation == "x"
    assert tries == [{"task_id": 7, "level": 2, "seed": 5}] * 3


@pytest.mark.parametrize(
    ("answer", "row", "words"),
    [
        (observed(reward=0.0, done=True), {"t": 1}, "is done before the first action"),
        (observed(reward=0.5, done=False), {"t": 1}, "gave a reward of 0.5 before the first action"),
        ({"type": "error", "data": {"message": "no such task"}}, {"t": 1}, "reset: no such task"),
        (observed(), {}, "the row has no t, which is listed in reset_columns"),
    ],
)
def test_a_beginning_that_is_none_is_a_failure(answer: Any, row: dict[str, Any], words: str) -> None:
    async def scene(environment: OpenEnvEnvironment) -> Step:
        return as_step(await environment.reset(row, 1), is_reset=True, max_bytes=100)

    with pytest.raises((InvalidStep, OpenEnvFailed)) as caught:
        against(lambda _: answer, scene, reset_columns=["t"])
    assert words in str(caught.value)


def test_a_server_that_is_not_there_is_named_without_its_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # taken, and nobody listens
        port = taken.getsockname()[1]
        environment = OpenEnvEnvironment(url=f"http://user:secret@127.0.0.1:{port}/path?key=secret")
        with pytest.raises(OpenEnvFailed) as caught:
            run(lambda: environment.reset({}, 1))
    assert f"ws://127.0.0.1:{port}/... cannot be reached" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "127.0.0.1:8000"}, "the value of the option `url` is not the address of a server"),
        ({"url": "ftp://h"}, "the value of the option `url` is not the address of a server"),
        ({"url": "http://h:99999"}, "the value of the option `url` is not the address of a server"),
        ({"url": 3}, "the value of the option `url` is not the address of a server"),
        ({"url": "http://h", "reset_columns": "task"}, "`reset_columns` must be a list of column names, not 'task'"),
        ({"url": "http://h", "action": [1]}, "action must be a mapping, not [1]"),
        ({"url": "http://h", "pattern": "("}, "'(' is not a valid regular expression"),
    ],
)
def test_options_that_cannot_be_used_say_why(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        OpenEnvEnvironment(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1", "ws://h:1/ws"), ("https://h/a/", "wss://h/a/ws"), ("ws://h/ws", "ws://h/ws"),
        ("wss://h?token=t", "wss://h/ws?token=t"),
    ],
)  # fmt: skip
def test_an_address_is_that_of_the_servers_socket(url: str, address: str) -> None:
    assert OpenEnvEnvironment(url=url)._url == address
