"""Cores of the embedded engine in this process, without a job around them, for benchmarks of what they do.

Owns: their command line, the model they have, a core with answers before it. Refuses: which answers, what is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from areal_like.errors import UserError
from benchmarks.publishing import add_replace, result_path
from benchmarks.runs import command_of, write
from benchmarks.sums import VOCABULARY
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from rollout.engine.core import GenerationCore
from rollout.engine.decoder import LeanDecoder
from rollout.engine.slots import Answer


def parse(words: str | None, rounds: int) -> argparse.Namespace:
    """The command line of a benchmark that drives cores; one thread computes from then on. words: its help."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="its model.init, slots and group size")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true")
    add_replace(parser)
    torch.set_num_threads(1)
    return parser.parse_args()


def publish(name: str, rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Write what was found, unless it was a quick form."""
    if not options.quick:
        print(f"written to {write(name, command_of(name), {'rows': rows}, result_path(name, options))}")


def job_and_model(path: str | None, context: int) -> tuple[RunConfig, PreTrainedConfig]:
    """A config, the quickstart's where none is given, and the model that it makes, for so long a context.

    Raises SystemExit where it cannot be read or makes none.
    """
    try:
        job = load_config(path or "configs/quickstart.yaml").config
    except UserError as error:
        raise SystemExit(str(error)) from error
    if not job.model.init:
        raise SystemExit(f"{path}: this benchmark makes its model; give it a config with model.init")
    init = {"vocab_size": VOCABULARY, **job.model.init, "max_position_embeddings": context}
    return job, AutoConfig.for_model(init.pop("model_type"), **init)


def core_with(
    waiting: Sequence[Answer], config: PreTrainedConfig, slots: int, context: int, *, session_bytes: int = 0
) -> GenerationCore:
    """An engine's core into which these answers go as soon as it has weights."""
    device = torch.device("cpu")

    def decoder() -> LeanDecoder:
        return LeanDecoder(config, slots, context, torch.float32, device)

    core = GenerationCore(decoder, config.vocab_size, slots, context, device, session_bytes=session_bytes)
    for answer in waiting:
        core.submit(answer)
    return core
