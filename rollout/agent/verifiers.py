"""The workflow `verifiers`: episodes of an environment of the `verifiers` package, against the policy's address.

An episode runs in bridges/verifiers_episode.py, in a separate process; tokens and verdicts are handled by workflow.py,
which this workflow builds on.

The package need not be in the Python environment of this program: it requires other versions of openai, datasets and
mcp than are used here (decision 0105). `python` names the interpreter that has it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from areal_like.errors import UserError
from areal_like.import_check import USER_PATH
from areal_like.wire.messages import SampleTask
from rollout.agent.programs import OWN_PYTHON
from rollout.agent.store import Thinking
from rollout.agent.workflow import AgentWorkflow
from rollout.workflow import OPTIONS_KEY, Sample, SampleTools

SCRIPT = Path(__file__).parent / "bridges" / "verifiers_episode.py"
VERSION_TIMEOUT_S = 300.0
Endpoint = Literal["chat", "tokens"]
REMEDY = (
    "pip install 'areal-like[verifiers]', or set the interpreter of a separate environment in which verifiers is "
    "installed"
)
FIRST_OF_TASK_SETS = (0, 4)
"""First version without environments that have data sets."""
PRELOADED = {
    True: ("openai", "verifiers.envs.environment", "verifiers.utils.env_utils"),
    False: ("openai", "verifiers.v1", "verifiers.v1.utils.loaders"),
}
"""Modules that take seconds to import, by whether the version is an earlier one. Programs are forked from a process
that has imported them."""


class VerifiersWorkflow:
    """Runs one episode for each sample."""

    is_resumable = False

    def __init__(
        self, *, environment: str, options: Mapping[str, Any] | None = None,
        eval_options: Mapping[str, Any] | None = None, python: str = "python", preload: bool = True,
        endpoint: Endpoint = "chat", tokenizer: str | None = None, renderer: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0, format: str | None = None, thinking: Thinking = "keep",
    ) -> None:  # fmt: skip
        """Args:
            environment: with verifiers 0.1 the argument of `load_environment`, with 0.4 the id of a task set.
            options: with 0.1 arguments of the environment, with 0.4 its configuration (`agent`, `taskset`, ...).
            eval_options: options that differ for rows of `data.eval`.
            python: the interpreter that has verifiers; `python` is the interpreter of the run.
            preload: import verifiers once, in a process that every episode is forked from.
            endpoint: with 0.4: `chat`: requests reach the policy as the agent sends them. `tokens`: verifiers renders
                them itself and sends token ids (`/inference/v1/generate`).
            tokenizer: with `tokens`: folder or name of the policy's tokenizer.
            renderer: with `tokens`: the renderer's configuration, as {name: qwen3}; None: by the tokenizer's name.
            timeout_s: time limit of one episode: see the workflow `agent`.
            format: see the workflow `agent`.
            thinking: see the workflow `agent`.

        Raises:
            UserError: the interpreter or the package is missing, or a setting is out of range.
        """
        if endpoint not in ("chat", "tokens"):
            raise UserError(f"`endpoint` must be `chat` or `tokens`, not {endpoint!r}", where=OPTIONS_KEY)
        if endpoint == "tokens" and tokenizer is None:
            raise UserError(
                "`endpoint: tokens` requires a tokenizer",
                where=OPTIONS_KEY,
                remedy="set `tokenizer` to a tokenizer folder",
            )
        if not environment or not isinstance(environment, str):
            what = f"environment must be the name of a verifiers environment, not {environment!r}"
            raise UserError(what, where=OPTIONS_KEY)
        if os.sep in python:  # relative to the folder the run was started in
            python = os.path.join(os.path.abspath(os.environ.get(USER_PATH) or os.curdir), python)
        if shutil.which(interpreter := sys.executable if python in OWN_PYTHON else python) is None:
            what = f"there is no program {interpreter!r}"
            raise UserError(what, where=f"{OPTIONS_KEY}.python", remedy=REMEDY)
        installed = version_in(interpreter)
        is_first = tuple(map(int, re.findall(r"\d+", installed)[:2])) < FIRST_OF_TASK_SETS
        if endpoint == "tokens" and is_first:
            what = f"`endpoint: tokens` requires verifiers 0.4, but {interpreter} has {installed}"
            raise UserError(what, where=OPTIONS_KEY, remedy="endpoint: chat")
        spec = {
            "environment": environment, "options": dict(options or {}), "eval_options": dict(eval_options or {}),
            "endpoint": endpoint, "tokenizer": tokenizer, "renderer": renderer,
        }  # fmt: skip
        self._agent = AgentWorkflow(
            command=[interpreter, str(SCRIPT), json.dumps(spec)],
            preload=PRELOADED[is_first] if preload else (),
            reward="agent", timeout_s=timeout_s, format=format, thinking=thinking,
        )  # fmt: skip

    async def run(self, task: SampleTask, tools: SampleTools) -> Sample:
        """See `Workflow`."""
        return await self._agent.run(task, tools)


@lru_cache(maxsize=8)
def version_in(interpreter: str) -> str:
    """Version of verifiers that an interpreter has. Raises UserError if it has none."""
    where = f"{OPTIONS_KEY}.python"
    try:
        asked = subprocess.run(
            [interpreter, str(SCRIPT), "version"],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{interpreter} cannot be started ({error})", where=where) from error
    if found := asked.stdout.strip():
        return found
    reason = f" ({asked.stderr.strip().splitlines()[-1]})" if asked.stderr.strip() else ""
    raise UserError(
        f"the `verifiers` package is not installed for {interpreter}{reason}",
        where=where,
        remedy=REMEDY,
    )
