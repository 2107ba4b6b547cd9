"""Cores of the embedded engine in this process, without a job, for benchmarks of the engine.

Contains the command line of these benchmarks, their model, and a core with given answers. The benchmarks choose the
answers and measure.
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
    """Parse the command line of a benchmark that runs cores, and limit torch to one thread. words: its help."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="its model.init, slots and group size")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true")
    add_replace(parser)
    torch.set_num_threads(1)
    return parser.parse_args()


def publish(name: str, rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Write the result, unless the benchmark ran with --quick."""
    if not options.quick:
        print(f"written to {write(name, command_of(name), {'rows': rows}, result_path(name, options))}")


def job_and_model(path: str | None, context: int) -> tuple[RunConfig, PreTrainedConfig]:
    """A config (default: the quickstart) and the config of its model, with positions for `context` tokens.

    Raises SystemExit if the config cannot be read or has no model.init.
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
    """An engine core that takes these answers as soon as it has weights."""
    device = torch.device("cpu")

    def decoder() -> LeanDecoder:
        return LeanDecoder(config, slots, context, torch.float32, device)

    core = GenerationCore(decoder, config.vocab_size, slots, context, device, session_bytes=session_bytes)
    for answer in waiting:
        core.submit(answer)
    return core
