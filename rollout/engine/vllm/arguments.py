"""The command line and the environment variables of one vLLM server."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_like.device_names import names_cpu
from areal_like.errors import UserError
from rollout.config import EngineSettings
from rollout.engine.server.environment import Argument, clashing, clean_environment
from rollout.engine.vllm.environment import ENVIRONMENT, PYTHON

log = logging.getLogger(__name__)

INSIDE = Path(__file__).parent / "inside"
"""Folder of the file that vLLM's processes import."""
MODULE, BACKEND, KEY_VARIABLE = "areal_like_vllm", "areal_like", "AREAL_LIKE_VLLM_KEY"
"""Names that inside/areal_like_vllm.py has or registers."""
CPU_BLOCK = 32
"""Tokens of a block of the cache on a CPU, where only multiples of it are possible."""
MIN_CACHE_BYTES = 64 << 20
_WHERE = "rollout.engine.vllm.arguments"
_OURS = (
    "model", "model-tag", "served-model-name", "host", "port", "uds", "dtype", "tensor-parallel-size",
    "pipeline-parallel-size", "data-parallel-size", "max-model-len", "max-num-seqs", "seed", "load-format",
    "skip-tokenizer-init", "generation-config", "logprobs-mode", "enable-scale-out", "tokens-only", "middleware",
    "worker-extension-cls", "weight-transfer-config", "stream-interval", "gpu-memory-utilization",
    "enable-prompt-tokens-details", "config", "api-key", "api-server-count", "headless", "quantization",
    "kv-cache-dtype", "enable-sleep-mode", "enable-lora", "speculative-config", "async-scheduling",
    "no-async-scheduling", "no-enable-prefix-caching",
)  # fmt: skip
"""Arguments that this program sets, or whose effects on versions and log-probs are not known."""


@dataclass(frozen=True)
class Launch:
    """Launch settings that stay the same over the restarts of a server. `context` is the longest prompt plus answer,
    tokens; `cache_bytes` the size of the cache on a CPU."""

    python: Path
    settings: EngineSettings
    dtype: str
    context: int
    cache_bytes: int
    num_threads: int
    extra: tuple[str, ...] = ()
    """Command-line words of `rollout.engine.vllm.arguments`."""

    @property
    def is_cpu(self) -> bool:
        """Whether it runs on a CPU."""
        return names_cpu(self.settings.device)

    def command(self, folder: Path, version: int, *, port: int, seed: int) -> list[str]:
        """The server's command line. `version` -1: the folder's weights are not loaded, because the first version
        brings others."""
        vllm = self.settings.vllm
        words: dict[str, object] = {
            "served-model-name": "policy",
            "host": "127.0.0.1",
            "port": port,
            "dtype": self.dtype,
            "seed": seed % 2**31,
            "tensor-parallel-size": vllm.tp_size,
            "max-model-len": self.context,
            "max-num-seqs": self.settings.num_slots,
            "stream-interval": vllm.stream_tokens,
            "load-format": "auto" if version >= 0 else "dummy",
            "generation-config": "vllm",  # the model's own end-of-sequence ids and sampling settings are not used
            "logprobs-mode": "processed_logprobs",  # with the temperature; without top-k and top-p by WorkerExtension
            "middleware": f"{MODULE}.RequireKey",
            "worker-extension-cls": f"{MODULE}.WorkerExtension",
            "weight-transfer-config": json.dumps({"backend": BACKEND}),
        }
        flags = [
            "skip-tokenizer-init", "enable-scale-out", "enable-prompt-tokens-details", "no-async-scheduling",
            "disable-uvicorn-access-log",
        ]  # fmt: skip
        if self.is_cpu:
            words |= {"kv-cache-memory-bytes": self.cache_bytes, "block-size": CPU_BLOCK}
            flags.append("enforce-eager")
        elif vllm.memory_fraction:
            words["gpu-memory-utilization"] = vllm.memory_fraction
        given = {word.removeprefix("--") for word in self.extra if word.startswith("--")}
        line = [str(self.python), "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
        for name, value in words.items():
            line += [] if name in given else [f"--{name}", str(value)]
        return [*line, *(f"--{flag}" for flag in flags if flag not in given), *self.extra]

    def variables(self, scratch: Path, key: str) -> dict[str, str]:
        """The server's environment. Of our code it imports one file; nothing is downloaded, and its files are in
        `scratch`. The key is not on the command line, which every user of the machine can read."""
        own = self.settings.vllm.environment
        path = [str(INSIDE), *([own["PYTHONPATH"]] if "PYTHONPATH" in own else [])]
        variables = clean_environment() | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler cannot be arranged (inside/areal_like_vllm.py)
            "TMPDIR": str(scratch),
            "PYTHONUNBUFFERED": "1",
            KEY_VARIABLE: key,
        }
        if self.is_cpu:
            variables |= {
                "OMP_NUM_THREADS": str(self.num_threads),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "TORCHDYNAMO_DISABLE": "1",  # `enforce-eager` leaves small functions that a compiler would build
            }
        elif ":" in self.settings.device:
            visible, count = variables.get("CUDA_VISIBLE_DEVICES"), self.settings.vllm.tp_size
            variables["CUDA_VISIBLE_DEVICES"] = _devices(self.settings.device, count, visible)
        return variables | own | {"PYTHONPATH": ":".join(path)}


def plan_launch(settings: EngineSettings, *, dtype: str, context: int, token_bytes: int, num_threads: int) -> Launch:
    """Check vLLM's environment, and the user's further arguments against that version's list. `token_bytes`: keys and
    values of one token. Raises UserError."""
    python = ENVIRONMENT.find_python(settings.python or PYTHON)
    found = ENVIRONMENT.check_version(python)
    log.info("using vLLM %s and torch %s in %s", found.get("vllm"), found.get("torch"), python.parents[1])
    extra: list[str] = []
    if settings.vllm.arguments:  # the list of arguments takes long to read
        extra = extra_words(settings, ENVIRONMENT.argument_table(python, is_cpu=names_cpu(settings.device)))
    blocks = settings.num_slots * (-(-context // CPU_BLOCK) + 1) + 1
    cache_bytes = max(MIN_CACHE_BYTES, blocks * CPU_BLOCK * token_bytes)
    return Launch(python, settings, dtype, context, cache_bytes, num_threads, tuple(extra))


def extra_words(settings: EngineSettings, table: Mapping[str, Argument]) -> list[str]:
    """Command-line words of the user's further arguments. Raises UserError for one that is not allowed."""
    given = settings.vllm.arguments
    for name in clashing(given, _OURS):
        raise UserError(
            f"`{name}` is reserved for areal_like, or is not supported",
            where=_WHERE,
            remedy="use the settings in rollout.engine instead",
        )
    return ENVIRONMENT.argument_words(given, table, _WHERE)


def _devices(device: str, count: int, visible: str | None) -> str:
    """The GPUs of a server whose first one is `cuda:N` of those that are visible to this process: CUDA's names of
    them."""
    first = int(device.partition(":")[2])
    names = [name.strip() for name in visible.split(",")] if visible else [str(gpu) for gpu in range(first + count)]
    return ",".join(names[first : first + count])
