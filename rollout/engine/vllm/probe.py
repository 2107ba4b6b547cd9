"""The probe prompt, which proves that a server computes with a published version.

On a CPU vLLM's own checksums cover no linear layer, since these are packed for its kernels. A version's log-probs of
one prompt depend on every tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from areal_like.errors import WeightError
from rollout.engine.server.staging import WEIGHT_FILE
from rollout.engine.vllm.client import VLLMClient

LENGTH = 32
TOLERANCE_NATS = 1e-3
"""Ten times the largest difference between vLLM and transformers in float32 that the tests allow."""


@dataclass(frozen=True)
class Probe:
    """A prompt, and the log-probs of all its tokens but the first under `version`."""

    version: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    async def check(self, client: VLLMClient) -> None:
        """Raise WeightError if the server, which must not be paused, has other log-probs."""
        said = await client.prompt_logprobs(list(self.tokens))
        error_nats = float(np.abs(np.array(said) - np.array(self.logprobs)).max())
        if not error_nats <= TOLERANCE_NATS:
            raise WeightError(
                f"the server's log-probs of a probe prompt differ by {error_nats:.3g} nats from those of version "
                f"{self.version}"
            )


class ProbeMaker:
    """Computes probes with one model of transformers, whose tensors are replaced for each version."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._model: torch.nn.Module | None = None

    @torch.inference_mode()
    def make(self, version: int, folder: Path) -> Probe:
        """The probe of a staged version. Raises WeightError if its tensors do not fit the model."""
        if self._model is None:
            self._model = AutoModelForCausalLM.from_config(
                self._config, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        try:
            missing, unknown = self._model.load_state_dict(load_file(folder / WEIGHT_FILE), strict=False, assign=True)
        except RuntimeError as error:
            raise WeightError(f"version {version} does not fit the model: {error}") from error
        if lost := [name for name in missing if name != "lm_head.weight"]:
            raise WeightError(f"version {version} does not fit the model: the version has no tensor {lost[0]}")
        if unknown:
            raise WeightError(f"version {version} does not fit the model: the model has no tensor {unknown[0]}")
        self._model.tie_weights()  # type: ignore[operator]
        length = min(LENGTH, int(self._config.get_text_config().max_position_embeddings))
        vocab_size = int(self._config.get_text_config().vocab_size)
        tokens = np.random.default_rng(version).integers(0, vocab_size, length)
        ids = torch.from_numpy(tokens)[None]
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return Probe(version, tuple(tokens.tolist()), tuple(logprobs.tolist()))
