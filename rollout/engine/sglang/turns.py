"""A server on a device that it shares with the trainer (`placement: colocated`): releases and allocates its memory.

controller/coordinator/colocation.py decides who has the device, engine.py what is loaded afterwards. Idle times of the
engines are in sleep.py.

    no server --take--> a server with memory, a version is loaded --leave--> the same server without it --take--> ...
                                                                  `-leave--> no server: it kept its memory, or died

The first server starts with the first version and not with the worker, because only then has the trainer, which also
starts on the device, released it. For the same reason a server that dies in the trainer's turn is restarted in the
engines' next turn. Weights are kept in host memory only if they are quantised: the next version replaces them all, but
does not contain the tensors that quantisation has created.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from rollout.engine.server.attempts import Attempts
from rollout.engine.server.http import ServerGone, ServerRefused
from rollout.engine.server.keeper import ServerKeeper
from rollout.engine.sglang.client import SGLangClient
from rollout.engine.sglang.sleep import ALL

log = logging.getLogger(__name__)


class DeviceLease:
    """The device of one engine; all methods are called with the lock of its loads and pauses held."""

    def __init__(
        self, keeper: ServerKeeper[SGLangClient], attempts: Attempts[SGLangClient], *, is_cpu: bool, num_gpus: int
    ) -> None:
        """`keeper`: not started yet. `num_gpus`: number of the server's GPUs."""
        self._keeper, self._attempts, self._is_cpu, self._num_gpus = keeper, attempts, is_cpu, num_gpus
        self._is_started = False
        self._epoch: int | None = None
        """Epoch of the server that has released its memory."""
        self.has_memory = False
        """The server has its memory."""

    async def take(self) -> bool:
        """Ensure that there is a server with memory, with any weights. Returns whether there was none before; the gate
        is not changed.

        Raises UserError (a user's mistake prevents the first start), EngineError.
        """
        if self.has_memory:
            return False
        if not self._is_started:
            started_s = time.monotonic()
            await self._keeper.start()
            log.info("the SGLang server is ready after %.1f s", time.monotonic() - started_s)
            self._is_started = True
        else:
            await self._take_again()
        self.has_memory = True
        return True

    async def _take_again(self) -> None:
        live, epoch = self._keeper.live, self._epoch
        self._epoch = None
        if live is not None and live.epoch == epoch:
            try:
                await live.client.resume_memory(ALL)
            except (ServerGone, ServerRefused) as error:
                await self._keeper.terminate(live.epoch, f"the server did not allocate its memory again ({error})")
        await self._keeper.resume_server()

    async def leave(self) -> int:
        """Release the memory and return the number of bytes. A server that fails to do so is ended, which also frees
        it.

        Running answers end as `cancelled`. Raises EngineError: there is no server any more.
        """
        self._attempts.gate.clear()
        if not self.has_memory:
            return 0
        self._attempts.end_all()
        live = await self._keeper.ready()
        self._keeper.rest()
        self.has_memory = False
        num_bytes = 0
        try:
            num_bytes = 0 if self._is_cpu else await self._held_bytes(live.client)
            await live.client.pause("abort")  # returns once every answer has ended
            await live.client.release_memory(ALL)
            self._epoch = live.epoch
        except (ServerGone, ServerRefused) as error:
            await self._keeper.terminate(live.epoch, f"the server did not release its memory ({error})")
        return num_bytes

    async def _held_bytes(self, client: SGLangClient) -> int:
        return held_bytes(await client.server_info()) * self._num_gpus


def held_bytes(server_info: Mapping[str, Any]) -> int:
    """Bytes of weights and cache on one of its GPUs, from the server's report (thousandths of 2^30 bytes); 0: not
    reported."""
    for state in server_info.get("internal_states", ()):
        usage = state.get("memory_usage", {})
        return int(sum(max(0.0, float(usage.get(name, 0.0))) for name in ("weight", "kvcache")) * 2**30)
    return 0
