"""The processes of the reward models of one service: one for each scorer `reward_model`, started before the pool.

What they compute is in model_host.py. The option `socket` of a scorer names the socket of its model. Scoring processes
are notified by the option `socket` where their model is.

Loop. `run` sleeps WATCH_S; a process that died is restarted, at most MAX_RESTARTS times. Meanwhile its scorers'
verdicts are `crashed` and are retried. It stops when cancelled by the pool, which then calls `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from areal_like.errors import OperationError, UserError
from areal_like.store_owner import claim
from services.reward.config import RewardSettings
from services.reward.model_host import status
from services.reward.scorer_options import RewardModelOptions

log = logging.getLogger(__name__)

WATCH_S = 0.25
START_POLL_S = 0.05
START_TIMEOUT_S = 600.0
"""Longest start: a large model from a slow disk takes minutes."""
MAX_RESTARTS = 5
KILL_WAIT_S = 10.0


class ModelHosts:
    """Call `start`, then `run` as a task, then `close`. `settings` are the service's, with the sockets set."""

    def __init__(self, settings: RewardSettings) -> None:
        self._options: list[RewardModelOptions] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder: Path | None = None
        self.num_restarts = 0
        self.settings = self._with_sockets(settings)

    @property
    def pids(self) -> set[int]:
        """Process ids of the processes that were started and not yet reaped."""
        return {process.pid for process in self._processes if process.returncode is None}

    def _with_sockets(self, settings: RewardSettings) -> RewardSettings:
        scorers = list(settings.scorers)
        for index, scorer in enumerate(scorers):
            if scorer.kind != "reward_model" or scorer.options.get("socket"):
                continue
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="areal_like-models-"))  # readable by this user only
                claim(self._folder)  # the next run removes it if this process is killed
            options = {**scorer.options, "socket": str(self._folder / f"{index}.socket")}
            scorers[index] = scorer.model_copy(update={"options": options})
            with contextlib.suppress(
                ValueError
            ):  # bad options are reported by the scorer itself, in the pool's first process
                self._options.append(RewardModelOptions.model_validate(options))
        return settings.model_copy(update={"scorers": tuple(scorers)})

    async def start(self) -> None:
        """Start all and wait until they are ready. Raises UserError for a model that cannot be loaded."""
        for options in self._options:
            self._processes.append(_spawned(options))
        for options, process in zip(self._options, self._processes, strict=True):
            await _ready(options, process)

    async def run(self) -> None:
        """Keep them running until cancelled. Raises OperationError if one exits repeatedly."""
        while True:
            await asyncio.sleep(WATCH_S)
            for index, (options, process) in enumerate(zip(self._options, list(self._processes), strict=True)):
                if process.poll() is None:
                    continue
                self.num_restarts += 1
                if self.num_restarts > MAX_RESTARTS:
                    raise OperationError(
                        f"processes of reward models exited more than {MAX_RESTARTS} times; the last one is "
                        f"that of {options.path}"
                    )
                log.error("the process of the reward model %s exited with status %s and is restarted", options.path,
                          process.returncode)  # fmt: skip
                self._processes[index] = _spawned(options)
                try:
                    await _ready(options, self._processes[index])
                except UserError as error:
                    raise OperationError(str(error)) from error

    def close(self) -> None:
        """Kill all processes and remove their folder."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_WAIT_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _spawned(options: RewardModelOptions) -> subprocess.Popen[bytes]:
    assert options.socket is not None
    status(options.socket).unlink(missing_ok=True)
    isolation = ["-P"] if sys.flags.safe_path else []
    module = [sys.executable, *isolation, "-m", "services.reward.model_host"]
    arguments = ["--options", options.model_dump_json(), "--service-pid", str(os.getpid())]
    return subprocess.Popen([*module, *arguments], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)


async def _ready(options: RewardModelOptions, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process reports that its model is loaded (owner of the wait: that process). Raises UserError."""
    assert options.socket is not None
    where, file = f"reward model {options.path}", status(options.socket)
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while not file.exists():
        if process.poll() is not None and not file.exists():
            raise UserError(
                f"the process of the model ended with status {process.returncode} while loading the model", where=where
            )
        if time.monotonic() > give_up_s:
            raise UserError(f"the model could not be loaded within {START_TIMEOUT_S:g} s", where=where)
        await asyncio.sleep(START_POLL_S)  # bounded above
    if refusal := file.read_text(encoding="utf-8"):
        raise UserError(refusal)
