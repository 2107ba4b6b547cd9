"""One episode of an environment of the `verifiers` package, run as an agent program (rollout/agent/verifiers.py).

    python verifiers_episode.py version          print the version that is installed, or nothing
    python verifiers_episode.py SPEC             SPEC: JSON of `environment`, `options`, `eval_options`, `endpoint`

A script for the interpreter that verifiers is installed in, which may be another one than ours: standard library and
verifiers only. It is alone in its folder, because Python puts that folder first on the path.

It chooses the task of a row, runs its episode against the policy's address, and reports the reward. Tasks, rewards and
turns are those of verifiers; tokens are handled by the listener of the rollout worker. If an episode fails, this
program exits with an error and does not report the reward, which verifiers gives as 0.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import sys
import urllib.request
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MODEL = "policy"
USER_PATH = "AREAL_LIKE_USER_PATH"
"""Environment variable of the folder with the user's own modules."""


class Failed(Exception):
    """The episode has no reward."""


def main(spec: Mapping[str, Any]) -> None:
    """Run the episode of this sample and report its reward."""
    sys.path[0] = os.environ.get(USER_PATH) or os.getcwd()
    row = _row()
    options = {**spec["options"], **(spec["eval_options"] if row.get("split") == "eval" else {})}
    verifiers = import_module("verifiers")
    run = _rollout if hasattr(verifiers, "load_environment") else _episode
    reward, components = asyncio.run(run(verifiers, spec, options, row))
    if not math.isfinite(reward):
        raise Failed(f"the reward of the episode is {reward}")
    named = {name: float(value) for name, value in components.items() if _is_number(value)}
    _call(os.environ["AREAL_LIKE_REWARD_URL"], {"reward": float(reward), "components": named})


async def _rollout(
    verifiers: Any, spec: Mapping[str, Any], options: Mapping[str, Any], row: Mapping[str, Any]
) -> tuple[float, Mapping[str, Any]]:
    """In verifiers 0.1: `load_environment`, a data set of tasks, and an OpenAI-compatible client."""
    environment = verifiers.load_environment(spec["environment"], **options)
    if getattr(environment, "requires_group_rollouts", False):
        raise Failed("the environment's rewards compare the answers of a group, but each episode is scored separately")
    tasks = environment.get_eval_dataset() if row.get("split") == "eval" else environment.get_dataset()
    config = import_module("verifiers.types").ClientConfig(
        client_type="openai_chat_completions",
        api_base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
    )
    output = await environment.run_rollout(dict(tasks[_number(row) % len(tasks)]), config, MODEL, {})
    if error := output.get("error"):
        raise Failed(_words(error))
    if output.get("reward") is None:
        raise Failed("the episode has no reward")
    return output["reward"], output.get("metrics") or {}


async def _episode(
    verifiers: Any, spec: Mapping[str, Any], options: Mapping[str, Any], row: Mapping[str, Any]
) -> tuple[float, Mapping[str, Any]]:
    """In verifiers 0.4: a task set, an agent, and a client that forwards requests or sends token ids."""
    v1 = import_module("verifiers.v1")
    loaders = import_module("verifiers.v1.utils.loaders")
    given = {**options, "taskset": {**options.get("taskset", {}), "id": spec["environment"]}}
    environment = loaders.load_environment(loaders.resolve_env_config(given))
    common = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}
    if spec["endpoint"] == "chat":
        client = v1.EvalClientConfig(**common)
    else:
        client = v1.TrainClientConfig(**common, renderer_model_name=spec["tokenizer"], renderer=spec["renderer"])
    context = import_module("verifiers.v1.clients").ModelContext(model=MODEL, client=client)
    async with environment.serving():
        episode = await environment.run_episode(_task(environment.taskset, _number(row)), context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not episode.traces:
        raise Failed(_words(errors[-1].message if errors else "the episode ended with an unknown error"))
    rewards = [trace.reward for trace in episode.traces]
    return sum(rewards), episode.traces[0].metrics


def _task(tasks: Any, number: int) -> Any:
    """The task of this number; numbers beyond the size of a finite set start again from its beginning."""
    if not tasks.INFINITE:
        listed = list(tasks)
        if not listed:
            raise Failed("the environment's task set is empty")
        return listed[number % len(listed)]
    return next(itertools.islice(iter(tasks), number, None))


def _number(row: Mapping[str, Any]) -> int:
    number = row.get("episode")
    if not isinstance(number, int):
        raise Failed("the row has no integer `episode`; set data.train: {generator: episodes}")
    return number


def _row() -> Any:
    if "AREAL_LIKE_ROW" in os.environ:
        return json.loads(os.environ["AREAL_LIKE_ROW"])
    return _call(os.environ["AREAL_LIKE_ROW_URL"])


def _call(url: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request) as response:
        return json.load(response)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _words(error: Any) -> str:
    """An error as one line; in verifiers 0.1 it is a dict."""
    if isinstance(error, Mapping):
        error = error.get("error_chain_str") or error.get("error_chain_repr") or error.get("error")
    return " ".join(str(error).split())[-1000:]


def _installed() -> str:
    try:
        return version("verifiers")
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    if sys.argv[1] == "version":
        print(_installed())
        sys.exit(0)
    try:
        main(json.loads(sys.argv[1]))
    except Failed as error:
        sys.exit(f"the verifiers episode failed: {error}")
