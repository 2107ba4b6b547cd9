"""The vLLM engine: implements the Engine protocol over one server that is launched here.

It contains the start, and the exchange of weights in each of the three modes. What it shares with SGLang's is in
rollout/engine/server/engine.py, HTTP in client.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
from transformers import PreTrainedConfig

from areal_like.errors import EngineError
from areal_like.weights.process_group import GroupCall
from rollout.config import EngineSettings, Interruption
from rollout.engine.loading import DTYPES
from rollout.engine.port import LoadReport
from rollout.engine.server.engine import Served, ServerEngine
from rollout.engine.server.staging import StagedVersion
from rollout.engine.vllm.arguments import plan_launch
from rollout.engine.vllm.client import VLLMClient
from rollout.engine.vllm.probe import Probe, ProbeMaker
from rollout.engine.vllm.servers import VLLMServers

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProbedVersion(StagedVersion):
    """A version that can be swapped in. `probe`: proves it; None: it is not proved."""

    probe: Probe | None


class VLLMEngine(ServerEngine[VLLMClient, ProbedVersion]):
    """One vLLM server behind the Engine port; the methods are specified in rollout/engine/port.py."""

    title = "vLLM"

    def __init__(self, model_dir: Path, settings: EngineSettings, **parts: Unpack[Served]) -> None:
        super().__init__(model_dir, settings, settings.vllm, **parts)
        self._probes: ProbeMaker | None = None
        self._kind: VLLMServers | None = None

    async def start(self) -> None:
        """Check environment and arguments, and start the server. Raises UserError, EngineError."""
        config = await self._read_config()
        if self._settings.vllm.probe:
            self._probes = ProbeMaker(config)
        launch = await asyncio.to_thread(
            plan_launch, self._settings, dtype=self._dtype, context=self._context,
            token_bytes=cache_token_bytes(config, DTYPES[self._dtype]), num_threads=self._num_threads,
        )  # fmt: skip
        self._kind = VLLMServers(self._settings.vllm, launch)
        keeper, _ = self._make_parts(self._kind, config)
        started_s = time.monotonic()
        await keeper.start()
        log.info("the vLLM server is ready after %.1f s", time.monotonic() - started_s)

    async def load_from_group(self, call: GroupCall, interruption: Interruption) -> LoadReport:
        """Not supported: `capabilities.group_ranks` is 0. Raises EngineError."""
        raise EngineError("a vLLM server cannot join a process group")

    async def release_memory(self) -> int:
        """Not supported: the descriptor's `releases_memory` is False. Raises EngineError."""
        raise EngineError("releasing the memory of a vLLM server is not supported")

    def _stage(self, manifest_path: Path) -> ProbedVersion:
        """Write the folder of a version, and compute its probe. Raises WeightError."""
        staged = self._stager.stage(manifest_path)
        try:
            probe = self._probes.make(staged.version, staged.folder) if self._probes else None
        except BaseException:
            self._stager.drop(staged)
            raise
        return ProbedVersion(**vars(staged), probe=probe)

    async def _exchange(self, client: VLLMClient, staged: ProbedVersion, interruption: Interruption) -> None:
        """Pause, load a version into the server, resume, and verify it. From the load on, nothing that it sends is
        looked at before the version is verified (`Attempts.proven`): vLLM refuses to begin another update while one is
        open, and its weights are not known."""
        attempts = self._started().attempts
        trace_s, num_running = self._now_s(), attempts.num_streaming
        if interruption != "keep_kv":
            await attempts.end_attempts(client, self._limits.control_timeout_s)
        await client.pause(clear_cache=interruption != "keep_kv")
        attempts.weights_change()
        attempts.proven.clear()
        load_s = time.monotonic()
        await client.load(str(staged.folder), staged.version, staged.shapes)
        load_s = time.monotonic() - load_s
        await client.resume()
        if staged.probe is not None:
            await staged.probe.check(client)
            self._num_proven += 1
        assert self._kind is not None
        self._kind.probe = staged.probe
        self._take_over(staged)
        self._trace_swap(trace_s, staged, interruption, num_running, load_s)


def cache_token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size * dtype.itemsize)
