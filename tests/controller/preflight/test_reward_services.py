"""Shared reward services at the start of a run: each that cannot be used is named, with what to do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from areal_like.transport.channel import Hub
from areal_like.transport.credentials import make_service_credentials, service_keys_folder
from areal_like.transport.ports import unused_port
from areal_like.wire import messages as m
from controller.config.loading import load_config
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.preflight import reward_services
from controller.preflight.reward_services import check_services, look_at_services
from controller.run_folder.run_folder import RunFolder
from controller.wiring.coordinator_settings import coordinator_settings
from controller.wiring.process_specs import Addresses, process_spec, reward_names


def config_of(**reward: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"init": {"model_type": "qwen3"}, "tokenizer": "bytes"},
            "data": {"train": {"generator": "running_sum"}},
            "reward": reward,
        }
    )


@contextlib.asynccontextmanager
async def service(label: str = "math@1", state: str = "wait:request", run_id: str = m.SHARED_RUN) -> AsyncIterator[str]:
    """A reward service that only answers questions about itself."""
    make_service_credentials(service_keys_folder())
    hub = Hub(
        run_id=run_id,
        role="reward",
        bind="tcp://127.0.0.1:0",
        curve_dir=service_keys_folder(),
        accept=frozenset({m.StatsRequest}),
    )
    address = await hub.start()

    async def answer() -> None:
        while True:
            taken = await hub.receive(1.0)
            if taken is not None and isinstance(taken[1], m.StatsRequest):
                stats = m.StatsReply(
                    request_id=taken[1].request_id, name="reward", pid=1, state=state, uptime_s=1.0, label=label,
                    scorers=tuple(part.partition("@")[0] for part in label.split("+")), num_workers=3, counters={},
                )  # fmt: skip
                hub.send(taken[0], stats)

    answering = asyncio.create_task(answer())
    try:
        yield address
    finally:
        answering.cancel()
        await asyncio.wait({answering})
        await hub.close()


def problems(*services: contextlib.AbstractAsyncContextManager[str], **reward: Any) -> list[Problem]:
    async def look() -> list[Problem]:
        async with contextlib.AsyncExitStack() as stack:
            addresses = [await stack.enter_async_context(one) for one in services]
            return (await look_at_services(config_of(addresses=addresses, **reward)))[1]

    return asyncio.run(look())


def test_services_that_answer_and_agree_are_no_problem_and_are_reported_in_a_line_each() -> None:
    assert problems(service(), service()) == []
    assert problems(service("math@1+code@2"), ask_for="code", scorers=[{"kind": "code"}]) == []

    async def check() -> list[str]:
        async with service() as address:
            return await check_services(config_of(addresses=[address]))

    (line,) = asyncio.run(check())
    assert "math@1, 3 processes" in line


def test_an_address_where_nobody_answers_is_named_with_the_command_that_starts_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reward_services, "ANSWER_S", 0.2)
    address = f"tcp://127.0.0.1:{unused_port()}"
    config = config_of(addresses=[address])
    (problem,) = reward_services.problems_of(config)
    assert problem.keys == ("reward.addresses.0",)
    assert address in problem.what
    assert f"python -m services.reward serve --config FILE --bind {address}" in problem.remedy
    with pytest.raises(UserError, match=address):
        asyncio.run(check_services(config))


def test_a_service_of_a_run_is_refused_with_its_own_words() -> None:
    (problem,) = problems(service(run_id="another"))
    assert "another" in problem.what


@pytest.mark.parametrize(
    ("services", "reward", "key", "words"),
    [
        ([{"state": "drain"}], {}, "reward.addresses.0", "shutting down"),
        ([{}], {"ask_for": "judge"}, "reward.ask_for", "no scorer `judge`"),
        ([{}], {"scorers": [{"kind": "code"}]}, "reward.scorers", "`code` is not a scorer"),
        ([{}, {"label": "math@2"}], {}, "reward.addresses.1", "scores math@2"),
    ],
)
def test_a_service_that_does_not_fit_is_refused(
    services: list[dict[str, Any]], reward: dict[str, Any], key: str, words: str
) -> None:
    (problem,) = problems(*(service(**one) for one in services), **reward)
    assert problem.keys[0] == key
    assert words in problem.what


def spec_of(config: RunConfig, role: Any, name: str, tmp_path: Path) -> Any:
    rewards = tuple(f"tcp://127.0.0.1:{7000 + place}" for place in range(len(reward_names(config))))
    addresses = Addresses("tcp://127.0.0.1:1", rewards, tmp_path, tmp_path / "keys")
    return process_spec(
        config, RunFolder(tmp_path), addresses, run_id="r", role=role, name=name, model_dir=tmp_path, lineage="l0"
    )


def test_a_run_names_its_own_services_and_none_where_it_shares(tmp_path: Path) -> None:
    assert reward_names(config_of()) == ["reward"]
    two = config_of(num_services=2)
    assert reward_names(two) == ["reward-0", "reward-1"]
    assert spec_of(two, "reward", "reward-1", tmp_path).bind_address == "tcp://127.0.0.1:7001"
    assert len(spec_of(two, "rollout", "rollout-0", tmp_path).reward_addresses) == 2
    shared = config_of(addresses=["tcp://gpu7:7000"], ask_for="math", curve_dir="/keys")
    assert reward_names(shared) == []
    assert reward_names(load_config("tool_sum").config) == [], "its workflow makes the verdicts"
    spec = spec_of(shared, "rollout", "rollout-0", tmp_path)
    assert (spec.reward_addresses, spec.are_rewards_shared) == (("tcp://gpu7:7000",), True)
    assert (spec.reward_scorer, spec.reward_curve_dir) == ("math", "/keys")


def test_the_policy_of_each_scorer_reaches_the_coordinator_by_its_name() -> None:
    scorers = [{"kind": "math", "on_failure": "drop_group"}, {"kind": "math", "on_failure": 0.0}, {"kind": "format"}]
    settings = coordinator_settings(config_of(scorers=scorers), max_draws=None, num_eval_rows=0, num_periodic_rows=0)
    assert settings.on_failure == "drop_sample"
    assert settings.on_failure_of == {"math": "drop_group", "math#2": 0.0}
