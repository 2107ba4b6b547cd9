"""An engine for a frozen model: the weights of a folder, or a copy of an earlier version of the policy.

Generating is in embedded.py, the forward pass in the decoder; rollout/models/hosting.py decides when a copy is
replaced.

Without `is_refreshed` there is one set of weights instead of two: versions are not staged while answers run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from areal_like.errors import UserError, first_line
from rollout.config import EngineSettings
from rollout.engine.core import GenerationCore
from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.requests import check_tokens


class FrozenEngine(EmbeddedEngine):
    """The embedded engine, which also loads a folder and computes log-probs of tokens."""

    def __init__(
        self, model_dir: Path, settings: EngineSettings, *, dtype: str, num_threads: int, is_refreshed: bool = False
    ) -> None:
        super().__init__(model_dir, settings, dtype=dtype, num_threads=num_threads, has_spare=is_refreshed)

    async def load_folder(self, version: int) -> None:
        """Load the weights of the model's own folder as this version. Raises UserError, WeightError."""
        core = self._check_alive()
        await self._loop.run_in_executor(self._stager, self._stage_folder, core, version)
        await self._at_boundary(version, "recompute", 0.0)

    def _stage_folder(self, core: GenerationCore, version: int) -> None:
        with torch.inference_mode():
            core.decoder.stage(_folder_tensors(self._model_dir, self._dtype), version)

    async def logprobs(
        self, prompt_P: np.ndarray, tokens_R: np.ndarray, temperature: float = 1.0
    ) -> tuple[np.ndarray, int]:
        """Log-probs [R] float32 of tokens after a prompt, and the version that computed them.

        They are computed at a token boundary, while answers of this engine wait. Raises UserError: tokens outside the
        vocabulary, or too many for the context.
        """
        core = self._check_alive()
        if not len(prompt_P) or temperature <= 0:
            raise UserError("log-probs need a prompt of at least one token and a temperature above 0")
        known_T = np.concatenate((prompt_P, tokens_R)).astype(np.int64)
        check_tokens(known_T, core.vocab_size)
        if len(known_T) > core.slots.max_context:
            raise UserError(f"{len(known_T)} tokens are more than the context of {core.slots.max_context}")
        future = self._control_future()

        def compute() -> None:
            made = core.decoder.logprobs(known_T, len(prompt_P), temperature)
            self._settle(future, (made.cpu().numpy(), core.version))

        self._post(compute)
        found: tuple[np.ndarray, int] = await future
        return found


def _folder_tensors(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of a model's folder, by their names in published versions."""
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ... for a bad folder
        raise UserError(f"no model can be read from {folder} ({first_line(error)})") from error
    return dict(model.named_parameters())
