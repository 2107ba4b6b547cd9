"""The command line and the environment variables of one SGLang server.

It starts in process.py; environment.py knows which arguments its version has.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_like.device_names import names_cpu
from areal_like.errors import UserError
from rollout.config import EngineSettings, Interruption
from rollout.engine.server.environment import Argument, clashing, clean_environment
from rollout.engine.sglang.environment import CPU_VARIABLES, ENVIRONMENT, PYTHON

log = logging.getLogger(__name__)

SPARE_POSITIONS = 8
"""SGLang ends an answer a little before its context length; ours is used to the last position."""
CPU_MEMORY_FRACTION = 0.1
_WHERE = "rollout.engine.sglang.arguments"
_OURS = (
    "model-path", "model", "host", "port", "nccl-port", "device", "dtype", "tp-size", "tensor-parallel-size",
    "context-length", "max-running-requests", "weight-version", "skip-tokenizer-init", "incremental-streaming-output",
    "stream-interval", "random-seed", "mem-fraction-static", "base-gpu-id", "load-format", "skip-server-warmup",
    "config", "quantization", "kv-cache-dtype", "rl-quant-profile", "enable-deterministic-inference",
    "enable-memory-saver", "enable-weights-cpu-backup", "enable-return-routed-experts", "api-key", "admin-api-key",
)  # fmt: skip
_SEPARATED = re.compile(r"(enable-pd-|disaggregation-|encoder-|language-only|pdmux)")
"""Arguments that distribute one engine over several servers."""


@dataclass(frozen=True)
class Launch:
    """Launch settings that stay the same over the restarts of a server. `context` is the longest prompt plus answer,
    tokens."""

    python: Path
    settings: EngineSettings
    dtype: str
    context: int
    num_threads: int
    interruption: Interruption
    extra: tuple[str, ...]
    """Command-line words of `rollout.engine.sglang.arguments`."""
    in_turns: bool = False
    """It shares its GPUs, and releases all its memory while others use them."""

    @property
    def is_cpu(self) -> bool:
        """Whether it runs on a CPU."""
        return names_cpu(self.settings.device)

    def command(self, folder: Path, version: int, *, port: int, nccl_port: int, seed: int, key_file: Path) -> list[str]:
        """The server's command line. `version` -1: the folder's weights are not loaded, because the first version
        brings others. `key_file`: from `write_key_file`.
        """
        settings, sglang = self.settings, self.settings.sglang
        words: dict[str, object] = {
            "config": key_file,
            "model-path": folder,
            "weight-version": version if version >= 0 else "none",
            "random-seed": seed % 2**31,
            "host": "127.0.0.1",
            "port": port,
            "nccl-port": nccl_port,
            "device": "cpu" if self.is_cpu else "cuda",
            "dtype": self.dtype,
            "tp-size": sglang.tp_size,
            "context-length": self.context + SPARE_POSITIONS,
            "max-running-requests": settings.num_slots,
            "stream-interval": sglang.stream_tokens,
            "load-format": "auto" if version >= 0 else "dummy",
        }
        flags = ["skip-tokenizer-init", "incremental-streaming-output", "skip-server-warmup", *self._option_flags()]
        if sglang.quantization != "none":
            # Only this loader quantises again at every update, and it must have loaded real weights first.
            words |= {"quantization": sglang.quantization, "load-format": "flash_rl"}
        if sglang.kv_cache_dtype != "auto":
            words["kv-cache-dtype"] = sglang.kv_cache_dtype
        if self.is_cpu:
            words |= {
                "attention-backend": "torch_native",
                "mem-fraction-static": sglang.memory_fraction or CPU_MEMORY_FRACTION,
                "max-total-tokens": settings.num_slots * (self.context + SPARE_POSITIONS),
            }
        elif sglang.memory_fraction:
            words["mem-fraction-static"] = sglang.memory_fraction
        if ":" in settings.device:
            words["base-gpu-id"] = int(settings.device.partition(":")[2])
        # With the overlapped scheduler, a pause in place leaves one batch running that no span covers. On a CPU there
        # is nothing to overlap with: it is slower.
        if self.is_cpu or self.interruption == "keep_kv":
            flags.append("disable-overlap-schedule")
        # Its idle scheduler polls without a pause, on a core that other processes need.
        if self.is_cpu or self.in_turns:
            flags.append("sleep-on-idle")
        given = {word.removeprefix("--") for word in self.extra if word.startswith("--")}
        unset = {name.replace("_", "-") for name, value in self.settings.sglang.arguments.items() if value is False}
        flags = [flag for flag in flags if flag not in unset]
        line = [str(self.python), "-m", "sglang.launch_server"]
        for name, value in words.items():
            line += [] if name in given else [f"--{name}", str(value)]
        return [*line, *(f"--{flag}" for flag in flags if flag not in given), *self.extra]

    def _option_flags(self) -> list[str]:
        sglang = self.settings.sglang
        frees = (self.in_turns or sglang.release_idle_s is not None) and not self.is_cpu
        # A new version has all tensors of a plain model, but not those that quantisation has created.
        needs_backup = (self.in_turns and sglang.is_rounded) or (not self.in_turns and sglang.release == "all")
        chosen = {
            "enable-deterministic-inference": sglang.deterministic,
            "enable-memory-saver": frees,
            "enable-weights-cpu-backup": frees and needs_backup,
            "enable-return-routed-experts": sglang.routed_experts,
        }
        return [flag for flag, is_chosen in chosen.items() if is_chosen]

    def variables(self, scratch: Path) -> dict[str, str]:
        """The server's environment: our packages cannot be imported there, nothing is downloaded, and its files are in
        `scratch`.
        """
        variables = clean_environment()
        variables |= {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TMPDIR": str(scratch),
            "PYTHONUNBUFFERED": "1",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the spare positions, which requests never reach
        }
        if self.settings.sglang.unquantized_layers:
            variables["SGLANG_FP8_IGNORED_LAYERS"] = ",".join(self.settings.sglang.unquantized_layers)
        if self.is_cpu:
            variables |= CPU_VARIABLES | {"OMP_NUM_THREADS": str(self.num_threads)}
            if self.settings.sglang.tp_size > 1:
                variables["SGLANG_CPU_OMP_THREADS_BIND"] = _cores(self.settings.sglang.tp_size)
        return variables | self.settings.sglang.environment


def write_key_file(folder: Path, key: str) -> Path:
    """Write a configuration file with the server's key, which on the command line would be visible to every user of the
    machine. Both of SGLang's keys are set to it, so every route requires it.
    """
    path = folder / "key.yaml"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"api-key": key, "admin-api-key": key}, file)
    return path


def plan_launch(
    settings: EngineSettings,
    *,
    dtype: str,
    context: int,
    num_threads: int,
    interruption: Interruption,
    in_turns: bool,
) -> Launch:
    """Check SGLang's environment, and the user's further arguments against that version's list. Raises UserError."""
    python = ENVIRONMENT.find_python(settings.python or PYTHON)
    found = ENVIRONMENT.check_version(python)
    log.info("using SGLang %s and torch %s in %s", found.get("sglang"), found.get("torch"), python.parents[1])
    extra = extra_words(settings, ENVIRONMENT.argument_table(python, is_cpu=names_cpu(settings.device)), interruption)
    return Launch(python, settings, dtype, context, num_threads, interruption, tuple(extra), in_turns)


def extra_words(settings: EngineSettings, table: Mapping[str, Argument], interruption: Interruption) -> list[str]:
    """Command-line words of the user's further arguments. Raises UserError for one that is not allowed."""
    given = settings.sglang.arguments
    for name in clashing(given, _OURS):
        raise UserError(
            f"`{name}` is reserved for areal_like", where=_WHERE, remedy="use the settings in rollout.engine instead"
        )
    for name in given:
        if _SEPARATED.match(name.lstrip("-").replace("_", "-")):
            raise UserError(
                f"`{name}` distributes one engine over several servers, but a worker updates the weights of only one "
                "server, so the others would continue with the old version",
                where=_WHERE,
                remedy="use more workers (rollout.num_workers) or a larger tp_size",
            )
    unset = dict.fromkeys(clashing(given, ["disable-overlap-schedule"]))
    if interruption == "keep_kv" and any(given[name] is False for name in unset):
        raise UserError(
            "keep_kv does not work with SGLang's overlap scheduler, because the policy version of one token per answer "
            "would be unknown",
            where=_WHERE,
            remedy="remove disable-overlap-schedule, or set rollout.interruption: recompute",
        )
    return ENVIRONMENT.argument_words(given, table, _WHERE)


def _cores(count: int) -> str:
    """Cores of each of `count` ranks, in SGLang's format: `0-3|4-7`."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
    share = max(1, len(cores) // count)
    parts = [cores[rank * share % len(cores) :][:share] for rank in range(count)]
    return "|".join(",".join(map(str, part)) for part in parts)
