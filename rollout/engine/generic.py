"""A decoder for any other Hugging Face causal LM, through its own module: one cache and one forward pass per row.

It is slow: a step costs one forward call per active row. Results are correct for every architecture, because the cache
(sliding windows, recurrent state) is the one that transformers creates for the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from areal_like.errors import UserError
from areal_like.weights.adapter_folder import AdapterFolder
from rollout.engine.adapter_layout import BASE
from rollout.engine.adapters import ModuleAdapters
from rollout.engine.loading import Place, fill
from rollout.engine.scoring import gathered


class _Copy:
    """One instance of the model, and the target of each published tensor in it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        named = dict(model.named_parameters())
        self.places = {
            name: Place(tuple(tensor.shape), tuple(tensor.shape), tensor.detach()) for name, tensor in named.items()
        }
        self.optional = frozenset(model.state_dict()) - frozenset(named)


class GenericDecoder:
    """transformers' own forward pass, row by row. adapters: as in LeanDecoder."""

    can_share = False

    def __init__(
        self, config: PreTrainedConfig, num_slots: int, dtype: torch.dtype, device: torch.device,
        *, has_spare: bool = True, adapters: Sequence[AdapterFolder] = (),
    ) -> None:  # fmt: skip
        try:
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except ValueError as error:
            raise UserError(f"model type {config.model_type} is not a causal language model ({error})") from error
        model.tie_weights()  # the skipped initialisation would have done this
        model = model.to(device).eval().requires_grad_(False)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.device = device
        self.on_pass: Callable[[], None] = lambda: None
        self._active = _Copy(model)
        self._spare = _Copy(copy.deepcopy(model)) if has_spare else self._active
        self._adapters = ModuleAdapters(adapters, [one.model for one in {self._active, self._spare}], dtype, device)
        self._caches: list[Any] = [None] * num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of both copies of the model; caches are allocated and freed with their rows."""
        copies = {self._active, self._spare}
        weights = sum(tensor.nbytes for one in copies for tensor in one.model.state_dict().values())
        return weights + self._adapters.num_bytes

    @property
    def max_moved_tokens(self) -> int:
        return 0

    def stage(self, tensors: Mapping[str, Tensor], version: int) -> None:
        fill(self._spare.places, tensors, self._spare.optional, version)

    def swap(self) -> None:
        self._active, self._spare = self._spare, self._active

    def prefill(
        self, rows: Sequence[int], contexts: Sequence[np.ndarray], starts: Sequence[int],
        adapters_N: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        assert not any(starts), "rows of the generic decoder cannot be shared"
        adapters = [BASE] * len(rows) if adapters_N is None else adapters_N.tolist()
        for row, context, adapter in zip(rows, contexts, adapters, strict=True):
            self.on_pass()
            self._caches[row] = None
            if len(context):
                self._forward(row, np.asarray(context, np.int64), adapter)

    def step(self, tokens_B: np.ndarray, positions_B: np.ndarray, adapters_B: np.ndarray | None = None) -> Tensor:
        adapters = [BASE] * len(tokens_B) if adapters_B is None else adapters_B.tolist()
        return torch.cat([self._forward(row, tokens_B[row : row + 1], one) for row, one in enumerate(adapters)])

    def _forward(self, row: int, tokens_T: np.ndarray, adapter: int) -> Tensor:
        self._adapters.current = adapter
        ids = torch.from_numpy(tokens_T.copy())[None].to(self.device)
        result = self._active.model(input_ids=ids, past_key_values=self._caches[row], use_cache=True)
        self._caches[row] = result.past_key_values
        return result.logits[:, -1]

    def logprobs(self, tokens_T: np.ndarray, start: int, temperature: float, adapter: int = BASE) -> Tensor:
        tokens = torch.from_numpy(tokens_T).to(self.device)
        return gathered(self.logits(tokens_T, adapter), tokens, start, temperature)

    def logits(self, tokens_T: np.ndarray, adapter: int = BASE) -> Callable[[slice], Tensor]:
        self._adapters.current = adapter
        tokens = torch.from_numpy(tokens_T).to(self.device)
        logits_TV: Tensor = self._active.model(input_ids=tokens[None], use_cache=False).logits[0]
        return lambda part: logits_TV[part]

    def cost(self, lengths_B: np.ndarray) -> int:
        return 0  # row by row: the same in any order

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        moved = [self._caches[source] for source in sources]
        for source in sources:
            self._caches[source] = None
        for target, cache in zip(targets, moved, strict=True):
            self._caches[target] = cache

    def share_rows(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        raise AssertionError("the generic decoder cannot share KV cache entries between answers")

    @property
    def token_bytes(self) -> int:
        return 0

    def save_row(self, row: int, num_tokens: int) -> Any:
        raise AssertionError("the generic decoder cannot copy KV cache entries")

    def load_row(self, row: int, saved: Any, num_tokens: int) -> None:
        raise AssertionError("the generic decoder cannot copy KV cache entries")

    def clear_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._caches[row] = None
