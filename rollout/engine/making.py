"""Creates a core from a model's folder and the settings; it can generate once weights are loaded.

Weights are in loading.py, threads in embedded.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from areal_like.errors import UserError
from areal_like.trace import Tracer
from areal_like.weights.adapter_folder import read_adapter
from rollout.config import EngineSettings
from rollout.engine.core import GenerationCore
from rollout.engine.decoder import Decoder, LeanDecoder
from rollout.engine.device import find_device
from rollout.engine.generic import GenericDecoder
from rollout.engine.shape import exact_context, read_config, why_not_lean

log = logging.getLogger(__name__)


def make_core(
    model_dir: Path,
    settings: EngineSettings,
    dtype: torch.dtype,
    *,
    num_threads: int,
    tracer: Tracer | None,
    has_memory: bool = True,
    has_spare: bool = True,
    adapters: Sequence[Path] = (),
) -> GenerationCore:
    """Allocate both sets of weights and the cache, or leave that to the first version if `has_memory` is False.
    has_spare: False for a frozen model, with one set of weights. adapters: their folders, ordered by their numbers.

    Raises UserError: no such device or model, a context that the model does not cover exactly, an adapter that does not
    fit the model, or not enough memory.
    """
    config = read_config(model_dir)
    max_context = exact_context(config, settings.max_context)
    device = find_device(settings.device)
    torch.set_num_threads(num_threads)
    reason = why_not_lean(config)
    if reason:
        log.warning(
            "the built-in decoder does not support this model (%s); using transformers modules, which generate one "
            "sequence at a time",
            reason,
        )

    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    if vocab_size is None:
        raise UserError(f"model type {config.model_type} is not a causal language model (its config has no vocab_size)")

    read = [read_adapter(folder) for folder in adapters]

    def make_decoder() -> Decoder:
        num_slots = settings.num_slots
        with torch.inference_mode():
            if reason:
                return GenericDecoder(config, num_slots, dtype, device, has_spare=has_spare, adapters=read)
            return LeanDecoder(config, num_slots, max_context, dtype, device, has_spare=has_spare, adapters=read)

    try:
        return GenerationCore(
            make_decoder, int(vocab_size), settings.num_slots, max_context, device, tracer, has_memory=has_memory,
            session_bytes=int(settings.session_cache_mb * 2**20), has_adapters=bool(read),
            frozen="" if has_spare else f"the frozen model in {model_dir}",
        )  # fmt: skip
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "alloc" not in str(error):
            raise
        raise UserError(
            f"there is not enough memory for the KV cache of {settings.num_slots} slots with {max_context} tokens each",
            where="rollout.engine",
            remedy="reduce num_slots or max_context",
        ) from error
