"""SGLang's servers as the keeper and the attempts see them: how they are launched, called and attached to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.errors import EngineError, UserError
from areal_like.transport.ports import unused_port
from rollout.config import SGLangSettings
from rollout.engine.server.kind import AnswerRequest, ModelFolder, ServerStart
from rollout.engine.server.process import SHARED_MEMORY, last_words
from rollout.engine.sglang.arguments import Launch, write_key_file
from rollout.engine.sglang.client import SGLangClient

FILES = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_", *SHARED_MEMORY)
"""Prefixes of the files in /dev/shm that a killed server leaves."""


@dataclass(frozen=True)
class SGLangServers:
    """A `ServerKind`. `launch` is None with `attach`."""

    settings: SGLangSettings
    launch: Launch | None
    reports_experts: bool = False
    """Answers report the experts that were used."""
    title: str = "SGLang"
    section: str = "rollout.engine.sglang"
    scratch_prefix: str = "areal_like-sg-"
    shared_memory: tuple[str, ...] = FILES

    def connect(self, url: str, key: str | None) -> SGLangClient:
        """See the protocol."""
        limits = self.settings
        return SGLangClient(
            url, control_timeout_s=limits.control_timeout_s, load_timeout_s=limits.load_timeout_s, key=key
        )

    def plan_start(self, home: ModelFolder, scratch: Path, *, key: str, port: int, seed: int) -> ServerStart:
        """See the protocol."""
        assert self.launch is not None, "an attached server is not started"
        command = self.launch.command(
            home.folder, home.version, port=port, nccl_port=unused_port(), seed=seed,
            key_file=write_key_file(scratch, key),
        )  # fmt: skip
        return ServerStart(command, self.launch.variables(scratch))

    async def prepare(self, client: SGLangClient, home: ModelFolder, *, is_launched: bool) -> bool:
        """Load the current version into an attached server, which may have any weights."""
        if is_launched:
            return True
        if home.version >= 0:
            await client.load(str(home.folder), home.version, flush_cache=True)
        return bool((await client.server_info()).get("incremental_streaming_output", False))

    def explain(self, tail: str, ended: str, log_path: Path) -> Exception:
        """See the protocol."""
        return explain_start(tail, ended, log_path)

    def body(self, request: AnswerRequest) -> dict[str, Any]:
        """See the protocol."""
        sampling = request.sampling
        asked: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
        }
        if self.settings.deterministic:
            asked["sampling_seed"] = request.seed % 2**63
        body = {
            "rid": request.ticket,
            "input_ids": request.tokens,
            "sampling_params": asked,
            "return_logprob": True,
            "stream": True,
            "extra_key": request.prefix_key,
        }
        return body | {"return_routed_experts": True} if self.reports_experts else body


_CAUSES: tuple[tuple[str, str, str], ...] = (
    # pattern in the log; its meaning ({0} is the match); how to fix it
    (r"error: (unrecognized arguments: .+|argument .+)", "SGLang rejects its command line: {0}",
     "correct rollout.engine.sglang.arguments"),
    (r"(Model architectures? .+ (?:are|is) not supported[^.\n]*"
     r"|Cannot find model module\. '[^'\n]+' is not a registered model)",
     "SGLang cannot load this model on this machine: {0}",
     "set rollout.engine.kind: embedded, or use an environment with the kernels that this model needs"),
    (r"(\S+ with minimum required version \S+ is not installed)", "SGLang's environment lacks a package: {0}",
     "install the package in that environment, or remove the option that needs it"),
    (r"((?:torch\.)?(?:cuda\.)?OutOfMemoryError[^\n]*|Not enough memory[^\n]*|DefaultCPUAllocator: can't allocate[^\n]*"
     r"|MemoryError[^\n]*|Cannot allocate memory[^\n]*)", "there is not enough memory for the SGLang server: {0}",
     "reduce rollout.engine.num_slots or max_context, or change rollout.engine.sglang.memory_fraction"),
    (r"([^\n]*(?:[Aa]ddress already in use|port \d+ is (?:not available|already in use))[^\n]*)",
     "the port of the SGLang server is in use: {0}", "stop the program that uses the port, or do not set sglang.port"),
)  # fmt: skip


_ARGUMENT_FRAME = re.compile(r'File "[^"\n]*(?:/server_args\.py|/arg_groups/[^"\n]*)", line')
"""Frames of a traceback while SGLang checks its arguments."""


def explain_start(tail: str, ended: str, log_path: Path) -> Exception:
    """Why a server did not start: a UserError if a restart would fail in the same way according to its log, else an
    EngineError."""
    for pattern, what, remedy in _CAUSES:
        found = re.search(pattern, tail)
        if found:
            words = " ".join(found.group(1).split())[:300]
            return UserError(what.format(words), where="rollout.engine", remedy=f"{remedy} (log: {log_path})")
    if _ARGUMENT_FRAME.search(tail):
        what = f"SGLang rejects its arguments: {last_words(tail)}"
        remedy = f"correct the options of rollout.engine.sglang (log: {log_path})"
        return UserError(what, where="rollout.engine", remedy=remedy)
    return EngineError(f"{ended} before it was ready: {last_words(tail)} (log: {log_path})")
