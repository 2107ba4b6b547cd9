"""An engine for a frozen model: the weights of a folder, or a copy of an earlier version of the policy.

Generating is in embedded.py, the forward pass in the decoder; rollout/models/hosting.py decides when a copy is
replaced.

Without `is_refreshed` there is one set of weights instead of two: versions are not staged while answers run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from areal_like.errors import UserError, first_line
from rollout.config import EngineSettings
from rollout.engine.core import GenerationCore
from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.requests import check_adapter, check_tokens


class FrozenEngine(EmbeddedEngine):
    """The embedded engine, which also loads a folder and computes log-probs of tokens."""

    def __init__(
        self, model_dir: Path, settings: EngineSettings, *, dtype: str, num_threads: int, is_refreshed: bool = False,
        adapters: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        super().__init__(
            model_dir, settings, dtype=dtype, num_threads=num_threads, has_spare=is_refreshed, adapters=adapters
        )
        self._scored = {"logprobs": 0.0, "logprobs_s": 0.0}

    def counters(self) -> dict[str, float]:
        """Also logprobs (tokens whose log-probs were computed) and logprobs_s (seconds of their passes)."""
        return {**super().counters(), **self._scored}

    async def load_folder(self, version: int) -> None:
        """Load the weights of the model's own folder as this version. Raises UserError, WeightError."""
        core = self._check_alive()
        await self._loop.run_in_executor(self._stager, self._stage_folder, core, version)
        await self._at_boundary(version, "recompute", 0.0)

    def _stage_folder(self, core: GenerationCore, version: int) -> None:
        with torch.inference_mode():
            core.decoder.stage(folder_tensors(self._model_dir, self._dtype), version)

    async def logprobs(
        self, prompt_P: np.ndarray, tokens_R: np.ndarray, temperature: float = 1.0, *, adapter: str = ""
    ) -> tuple[np.ndarray, int]:
        """Log-probs [R] float32 of tokens after a prompt, and the version that computed them.

        They are computed at a token boundary, while answers of this engine wait. Raises UserError: tokens outside the
        vocabulary, too many for the context, or an adapter that the engine does not have.
        """
        core = self._check_alive()
        if not len(prompt_P) or temperature <= 0:
            raise UserError("computing log-probs requires a prompt of at least one token and a temperature above 0")
        known_T = np.concatenate((prompt_P, tokens_R)).astype(np.int64)
        check_tokens(known_T, core.vocab_size)
        check_adapter(adapter, self._adapters)
        number = self.adapter_number(adapter)
        if len(known_T) > core.slots.max_context:
            raise UserError(
                f"the sequence has {len(known_T)} tokens, but the context is limited to {core.slots.max_context} tokens"
            )
        future = self._control_future()

        def compute() -> None:
            if future.done():  # the caller was cancelled while it waited
                return
            start_s = time.monotonic()
            made = core.decoder.logprobs(known_T, len(prompt_P), temperature, number).cpu().numpy()
            self._scored["logprobs"] += len(made)
            self._scored["logprobs_s"] += time.monotonic() - start_s
            self._settle(future, (made, core.version))

        self._post(compute)
        found: tuple[np.ndarray, int] = await future
        return found


def folder_tensors(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of a model's folder, by their names in published versions."""
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ... for a bad folder
        raise UserError(f"cannot load a model from {folder} ({first_line(error)})") from error
    return dict(model.named_parameters())
