"""vLLM's servers as the keeper and the attempts see them: how they are launched, called and prepared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from areal_like.errors import EngineError, UserError, WeightError
from rollout.config import VLLMSettings
from rollout.engine.server.kind import AnswerRequest, ModelFolder, ServerStart
from rollout.engine.server.process import SHARED_MEMORY, last_words
from rollout.engine.vllm.arguments import Launch
from rollout.engine.vllm.client import VLLMClient
from rollout.engine.vllm.probe import Probe


class VLLMServers:
    """A `ServerKind`."""

    title = "vLLM"
    section = "rollout.engine.vllm"
    scratch_prefix = "areal_like-vl-"
    shared_memory = ("vllm_", *SHARED_MEMORY)

    def __init__(self, settings: VLLMSettings, launch: Launch) -> None:
        self._settings, self._launch = settings, launch
        self.probe: Probe | None = None
        """The probe of the current version; None: it is not verified."""

    def connect(self, url: str, key: str | None) -> VLLMClient:
        """See the protocol."""
        limits = self._settings
        return VLLMClient(
            url, control_timeout_s=limits.control_timeout_s, load_timeout_s=limits.load_timeout_s, key=key
        )

    def plan_start(self, home: ModelFolder, scratch: Path, *, key: str, port: int, seed: int) -> ServerStart:
        """See the protocol."""
        command = self._launch.command(home.folder, home.version, port=port, seed=seed)
        return ServerStart(command, self._launch.variables(scratch, key))

    async def prepare(self, client: VLLMClient, home: ModelFolder, *, is_launched: bool) -> bool:
        """Prepare it for loads, and verify the version that it was started with. Raises EngineError."""
        await client.prepare(home.version)
        if self.probe is not None and self.probe.version == home.version:
            try:
                await self.probe.check(client)
            except WeightError as error:
                raise EngineError(str(error)) from error  # the fault of this server: another one is started
        return True

    def explain(self, tail: str, ended: str, log_path: Path) -> Exception:
        """See the protocol."""
        for pattern, what, remedy in _CAUSES:
            found = re.search(pattern, tail)
            if found:
                words = " ".join(found.group(1).split())[:300]
                return UserError(what.format(words), where="rollout.engine", remedy=f"{remedy} (log: {log_path})")
        return EngineError(f"{ended} before it was ready: {last_words(tail)} (log: {log_path})")

    def body(self, request: AnswerRequest) -> dict[str, Any]:
        """See the protocol."""
        sampling = request.sampling
        asked: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.temperature else 1.0,
            "top_k": sampling.top_k if sampling.temperature else 0,
            "max_tokens": request.max_new_tokens,
            "seed": request.seed % 2**63,
            "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_token_ids),
            "ignore_eos": True,  # the ids that end an answer are all in `stop_token_ids`
            "logprobs": 0,
            "detokenize": False,
        }
        return {
            "request_id": request.ticket,
            "token_ids": request.tokens,
            "sampling_params": asked,
            "cache_salt": request.prefix_key,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


_CAUSES: tuple[tuple[str, str, str], ...] = (
    # pattern in the log; its meaning ({0} is the match); how to fix it
    (r"error: (unrecognized arguments: .+|argument .+)", "vLLM rejects its command line: {0}",
     "correct rollout.engine.vllm.arguments"),
    (r"(Model architectures? .+ (?:are|is) not supported[^.\n]*|[^\n]*has no vLLM implementation[^\n]*)",
     "vLLM cannot load this model on this machine: {0}", "set rollout.engine.kind: embedded"),
    (r"(Head size \d+ is not supported[^\n]*|[Hh]ead_size not supported[^\n]*|No valid attention backend[^\n]*)",
     "vLLM has no attention kernel for this model on this machine: {0}", "set rollout.engine.kind: embedded"),
    (r"((?:torch\.)?(?:cuda\.)?OutOfMemoryError[^\n]*|No available memory for the cache blocks[^\n]*"
     r"|[^\n]*KV cache is needed, which is larger than[^\n]*|DefaultCPUAllocator: can't allocate[^\n]*"
     r"|MemoryError[^\n]*|Cannot allocate memory[^\n]*)", "there is not enough memory for the vLLM server: {0}",
     "reduce rollout.engine.num_slots or max_context, or change rollout.engine.vllm.memory_fraction"),
    (r"([^\n]*(?:[Aa]ddress already in use|port \d+ is already in use)[^\n]*)",
     "the port of the vLLM server is in use: {0}", "stop the program that uses the port, or do not set vllm.port"),
)  # fmt: skip
