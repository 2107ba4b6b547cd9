"""Checks at the start of a run the reward services at `reward.addresses`, which the run uses without starting them:
whether they answer, and have the required scorers.

When a service fails later, the rollout workers' clients use another one, or wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from areal_like.errors import ChannelError, DeadlineExceeded, UserError
from areal_like.transport.service_stats import ask_stats
from areal_like.wire.messages import StatsReply
from controller.config.problems import Problem
from controller.config.run_config import RunConfig

ANSWER_S = 5.0
"""Deadline of an answer. A service answers such a request immediately, even while it scores."""


async def look_at_services(config: RunConfig) -> tuple[list[StatsReply], list[Problem]]:
    """What the services at `reward.addresses` say of themselves, and what stands in the way of using them."""
    found = await asyncio.gather(
        *(_ask(config, place, address) for place, address in enumerate(config.reward.addresses))
    )
    stats = [answer for answer in found if isinstance(answer, StatsReply)]
    problems = [answer for answer in found if isinstance(answer, Problem)]
    return stats, problems or list(_misfits(config, stats))


async def _ask(config: RunConfig, place: int, address: str) -> StatsReply | Problem:
    key = (f"reward.addresses.{place}",)
    curve_dir = config.reward.keys_dir
    serve = f"start a service with python -m services.reward serve --config FILE --bind {address}"
    try:
        return await ask_stats(address, curve_dir=curve_dir, timeout_s=ANSWER_S)
    except DeadlineExceeded:
        what = f"no reward service at {address} responded within {ANSWER_S:g} s with the keys in {curve_dir}"
        return Problem(key, what, f"{serve}, or set reward.curve_dir to the key folder of the existing service")
    except ChannelError as error:
        return Problem(key, str(error), serve)
    except UserError as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        return Problem(
            key,
            what,
            error.remedy or "copy the service's key folder to this machine, and set reward.curve_dir to the copy",
        )


def _misfits(config: RunConfig, stats: Sequence[StatsReply]) -> Iterator[Problem]:
    reward = config.reward
    for place, (address, answer) in enumerate(zip(reward.addresses, stats, strict=True)):
        key, known = (f"reward.addresses.{place}",), ", ".join(answer.scorers)
        if answer.state == "drain":
            yield Problem(
                key, f"the reward service at {address} is shutting down", "restart the service, or use a different one"
            )
        if reward.ask_for is not None and reward.ask_for not in answer.scorers:
            yield Problem(
                ("reward.ask_for",),
                f"the reward service at {address} has no scorer `{reward.ask_for}`",
                f"use one of the scorers of this service: {known}",
            )
        if answer.label != stats[0].label:
            what = f"{address} scores {answer.label}, but {reward.addresses[0]} scores {stats[0].label}"
            yield Problem(key, what, "use the same config for all services, because any of them may score an answer")
        strangers = [name for name in reward.own_names if name not in answer.scorers]
        if strangers:
            what = f"`{strangers[0]}` is not a scorer of the reward service at {address}"
            yield Problem(
                ("reward.scorers",), what, f"remove reward.scorers to use the scorers of the service: {known}"
            )


def problems_of(config: RunConfig) -> list[Problem]:
    """The same for callers without an event loop."""
    return asyncio.run(look_at_services(config))[1] if config.reward.addresses else []


async def check_services(config: RunConfig) -> list[str]:
    """One line on each service. Raises UserError naming the address where one cannot be used."""
    stats, problems = await look_at_services(config)
    if problems:
        raise UserError(problems[0].what, where=problems[0].keys[0], remedy=problems[0].remedy)
    return [
        f"scoring at {address}: {answer.label}, {answer.num_workers} processes, {answer.state}"
        for address, answer in zip(config.reward.addresses, stats, strict=True)
    ]
