"""The decoder protocol, and the lean decoder for the Llama, Qwen2 and Qwen3 families.

Other architectures use `generic.GenericDecoder`.

A step of a small model on a CPU is bounded by the number of operators as much as by arithmetic: q, k and v are one
matrix product, and so are gate and up; norm and rotation are applied to q and k together; residuals are added by the
output products.

Legend: B rows of a step, N prompts of a prefill, M tokens of all of them, T tokens of one, H query heads, K key heads,
G = H / K, D head size, C context, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from areal_like.weights.adapter_folder import AdapterFolder
from rollout.engine.adapter_layout import BASE
from rollout.engine.adapters import FusedAdapters, LayerAdapters
from rollout.engine.kv_cache import KVCache
from rollout.engine.loading import FusedWeights, LayerWeights
from rollout.engine.scoring import gathered
from rollout.engine.shape import ModelShape

PREFILL_TOKENS, CPU_PREFILL_TOKENS = 8192, 1024
"""Number of padded tokens of one prefill pass. Small passes fit a CPU's caches, so they are faster there, and take less
memory."""
SEEN_PER_TOKEN = 4
"""Number of padded keys that a prefill pass may read for each padded token that it computes."""
ROTARY_CLASSES = {"llama": "LlamaRotaryEmbedding", "qwen2": "Qwen2RotaryEmbedding", "qwen3": "Qwen3RotaryEmbedding"}

Norm = Callable[[Tensor, Tensor], Tensor]


class Decoder(Protocol):
    """A model with room for `num_slots` rows. Rows 0..B-1 are the active ones at every step."""

    vocab_size: int
    can_share: bool
    """Whether `share_rows`, `save_row` and `load_row` are supported, which copy a row's first tokens."""
    on_pass: Callable[[], None]
    """Called before each pass of `prefill`."""

    @property
    def num_bytes(self) -> int:
        """Memory of both sets of weights and of the cache."""
        ...

    @property
    def max_moved_tokens(self) -> int:
        """Total number of tokens that rows may have to be exchanged in one move."""
        ...

    def stage(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Load into the spare weights, in any thread, while steps continue. Raises WeightError."""
        ...

    def swap(self) -> None:
        """Compute with the staged weights from now on."""
        ...

    def prefill(
        self, rows: Sequence[int], contexts: Sequence[np.ndarray], starts: Sequence[int], adapters_N: np.ndarray | None
    ) -> None:
        """Compute keys and values of `contexts` (token ids from position 0) from position `starts` on.

        Positions before `starts` are kept (`starts` is 0 if `can_share` is false), those after are replaced.
        adapters_N: number (int64) of the adapter of each row, or BASE; None: no row has one.
        """
        ...

    def step(self, tokens_B: np.ndarray, positions_B: np.ndarray, adapters_B: np.ndarray | None) -> Tensor:
        """Take one token (int64) of each of the rows 0..B-1 at its position; returns next-token logits [B, V].
        adapters_B: as in `prefill`."""
        ...

    def logprobs(self, tokens_T: np.ndarray, start: int, temperature: float, adapter: int) -> Tensor:
        """Log-probs [T - start], float32, of tokens (int64) from position `start` (at least 1) on, each after all
        before it, with an adapter or with BASE alone. No row is changed."""
        ...

    def logits(self, tokens_T: np.ndarray, adapter: int = BASE) -> Callable[[slice], Tensor]:
        """A function of a slice of positions that returns the logits [n, V] after them, each given all tokens (int64)
        up to it, with an adapter or with BASE alone. No row is changed."""
        ...

    def cost(self, lengths_B: np.ndarray) -> int:
        """Cost of attention over rows of these lengths in this order: number of keys of a layer that are read."""
        ...

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """Move row sources[i] (with lengths[i] tokens) to row targets[i], all at once: a row may be both.

        Sources that are not targets are free afterwards. Only rows that are exchanged are copied to memory outside the
        cache.
        """
        ...

    def share_rows(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """Copy the first tokens of rows `sources` to rows `targets`; no row is both."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in the copies of `save_row`."""
        ...

    def save_row(self, row: int, num_tokens: int) -> Any:
        """Copy the first tokens of a row to separate memory."""
        ...

    def load_row(self, row: int, saved: Any, num_tokens: int) -> None:
        """Restore the first `num_tokens` of a result of `save_row`, for this row or another one."""
        ...

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Clear non-finite values from these rows."""
        ...


def _torch_norm(eps: float) -> Norm:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight

    return norm


def _length_norm(eps: float, width: int) -> Norm:
    """x / sqrt(mean(x^2) + eps) = x / hypot(|x|, sqrt(width eps)) * sqrt(width); the last factor is in the weight.

    Takes half the time of F.rms_norm on a CPU, which consists of six operators there.
    """
    floor = torch.tensor((width * eps) ** 0.5)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor) * weight

    return norm


def rotary_table(config: PreTrainedConfig, max_context: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[C, 2, D]: cosines, and sines signed so that rotate_half(x) * sin = roll(x, D / 2) * signed sines."""
    family = config.model_type
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rotary = getattr(module, ROTARY_CLASSES[family])(config)
    cos, sin = rotary(torch.zeros(1, dtype=dtype), torch.arange(max_context)[None])
    half = cos.shape[-1] // 2
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
    return torch.stack((cos[0], signed), 1).to(device)


def plan_passes(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` by pass, longest first: each at most `max_tokens` padded tokens, or one item."""
    passes: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = passes and (len(passes[-1]) + 1) * longest <= max_tokens and 3 * lengths[index] + 32 >= longest
        if fits:
            passes[-1].append(index)
        else:
            passes.append([index])
            longest = lengths[index]
    return passes


class LeanDecoder:
    """Llama-like decoder with fused weights and a slotted key/value cache.

    has_spare: False for one set of weights, which may only be staged while no answer runs. adapters: loaded when it is
    created, and used with whatever weights are staged; UserError if they do not fit the model.
    """

    can_share = True

    def __init__(
        self, config: PreTrainedConfig, num_slots: int, max_context: int, dtype: torch.dtype, device: torch.device,
        *, has_spare: bool = True, adapters: Sequence[AdapterFolder] = (),
    ) -> None:  # fmt: skip
        self.shape = shape = ModelShape.of(config)
        self.vocab_size = shape.vocab_size
        self.device = device
        self.on_pass: Callable[[], None] = lambda: None
        self._pass_tokens = CPU_PREFILL_TOKENS if device.type == "cpu" else PREFILL_TOKENS
        is_cpu_fp32 = device.type == "cpu" and dtype == torch.float32
        self._norm: Norm = (
            _length_norm(shape.norm_eps, shape.hidden_size) if is_cpu_fp32 else _torch_norm(shape.norm_eps)
        )
        self._head_norm: Norm = _length_norm(shape.norm_eps, shape.head_size) if is_cpu_fp32 else self._norm
        self.cache = KVCache(shape, num_slots, max_context, dtype, device)
        self._rotary = rotary_table(config, max_context, dtype, device)
        sets = [FusedWeights(shape, dtype, device, norm_scale=is_cpu_fp32) for _ in range(1 + has_spare)]
        self._weights, self._spare = sets[0], sets[-1]
        base = {name: place.shape for name, place in sets[0].places.items()}
        self._adapters = FusedAdapters(adapters, base, shape, dtype, device)
        self._num_rotated = (shape.num_heads + shape.num_key_heads) * shape.head_size

    @property
    def num_bytes(self) -> int:
        weights = sum(one.num_bytes for one in {self._weights, self._spare})
        return self.cache.num_bytes + weights + self._adapters.num_bytes

    def stage(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self._spare.load(tensors, version)

    def swap(self) -> None:
        self._weights, self._spare = self._spare, self._weights

    # ------------------------------------------------------------------ forward

    def _project(
        self, x: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor, added: LayerAdapters | None
    ) -> tuple[Tensor, Tensor]:
        """x [M, hidden] -> normed and rotated q and k [M, K, G + 1, D], and v [M, K, D]."""
        shape = self.shape
        x = self._norm(x, layer.attention_norm)
        fused = x @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, x, layer.qkv)
        if added is not None:
            added.add("qkv", fused, x)
        heads = fused[:, : self._num_rotated].view(len(x), -1, shape.head_size)
        if layer.qk_norm is not None:
            heads = self._head_norm(heads, layer.qk_norm)
        heads = torch.addcmul(heads * cos, heads.roll(shape.head_size // 2, -1), sin)
        value = fused[:, self._num_rotated :].view(len(x), shape.num_key_heads, shape.head_size)
        return heads.view(len(x), shape.num_key_heads, -1, shape.head_size), value

    def _finish_layer(self, x: Tensor, attended: Tensor, layer: LayerWeights, added: LayerAdapters | None) -> Tensor:
        """Output projection and MLP, with their residuals."""
        x = torch.addmm(x, attended, layer.out)
        if added is not None:
            added.add("out", x, attended)
        if layer.out_bias is not None:
            x = x + layer.out_bias
        normed = self._norm(x, layer.mlp_norm)
        bias = layer.gate_up_bias
        y = normed @ layer.gate_up if bias is None else torch.addmm(bias, normed, layer.gate_up)
        if added is not None:
            added.add("gate_up", y, normed)
        inner = self.shape.intermediate_size
        y = F.silu(y[:, :inner]) * y[:, inner:]
        x = torch.addmm(x, y, layer.down)
        if added is not None:
            added.add("down", x, y)
        return x if layer.down_bias is None else x + layer.down_bias

    def step(self, tokens_B: np.ndarray, positions_B: np.ndarray, adapters_B: np.ndarray | None = None) -> Tensor:
        weights, group = self._weights, self.shape.num_queries_per_key
        tokens, positions = self._on_device(tokens_B), self._on_device(positions_B)
        plan = self.cache.plan(positions, positions_B + 1)
        cos, sin = self._rotary.index_select(0, positions).split(1, 1)
        x = weights.embedding.index_select(0, tokens)
        chosen = self._adapters.chosen(adapters_B)
        for index, layer in enumerate(weights.layers):
            heads, value = self._project(x, layer, cos, sin, chosen[index])
            self.cache.write(index, plan.places, heads[:, :, group], value)
            attended = self.cache.attend(index, plan, heads[:, :, :group])
            x = self._finish_layer(x, attended, layer, chosen[index])
        return self._norm(x, weights.norm) @ weights.head

    def logprobs(self, tokens_T: np.ndarray, start: int, temperature: float, adapter: int = BASE) -> Tensor:
        return gathered(self.logits(tokens_T, adapter), self._on_device(tokens_T), start, temperature)

    def logits(self, tokens_T: np.ndarray, adapter: int = BASE) -> Callable[[slice], Tensor]:
        shape, weights, group, num = self.shape, self._weights, self.shape.num_queries_per_key, len(tokens_T)
        tokens = self._on_device(tokens_T)
        cos, sin = self._rotary[:num].split(1, 1)
        x = weights.embedding.index_select(0, tokens)
        repeats = group if x.is_cuda and x.dtype == torch.float32 else 1  # as in a prefill pass
        chosen = self._adapters.chosen(np.full(num, adapter, np.int64))
        for index, layer in enumerate(weights.layers):
            heads, value = self._project(x, layer, cos, sin, chosen[index])
            query = heads[:, :, :group].reshape(num, shape.num_heads, shape.head_size)
            keys, values = (part.repeat_interleave(repeats, 1) for part in (heads[:, :, group], value))
            query, keys, values = (part.transpose(0, 1)[None] for part in (query, keys, values))
            attended = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=group > repeats)
            x = self._finish_layer(x, attended[0].transpose(0, 1).reshape(num, -1), layer, chosen[index])
        x = self._norm(x, weights.norm)
        return lambda part: x[part] @ weights.head

    def prefill(
        self, rows: Sequence[int], contexts: Sequence[np.ndarray], starts: Sequence[int],
        adapters_N: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        used = [index for index, context in enumerate(contexts) if len(context) > starts[index]]
        # A pass also copies the keys that its prompts see: not many times the tokens that it computes.
        rooms = [max(len(contexts[i]) - starts[i], -(-len(contexts[i]) // SEEN_PER_TOKEN)) for i in used]
        for chosen in plan_passes(rooms, self._pass_tokens):
            self.on_pass()
            members = [used[index] for index in chosen]
            parts = [contexts[index] for index in members]
            adapters = None if adapters_N is None else adapters_N[members]
            self._prefill_pass(
                [rows[index] for index in members], parts, [starts[index] for index in members], adapters
            )

    def _prefill_pass(
        self, rows: Sequence[int], contexts: Sequence[np.ndarray], starts: Sequence[int], adapters_N: np.ndarray | None
    ) -> None:
        """Prefill one packed batch: matrix products run over the M actual tokens, and only attention uses padded
        prompts [N, T].

        The padding follows a prompt's tokens, so causal attention of these tokens never reads it.
        """
        shape, group = self.shape, self.shape.num_queries_per_key
        stops = np.array([len(context) for context in contexts])
        lengths = stops - np.asarray(starts)
        num_prompts, longest, num_seen = len(contexts), int(lengths.max()), int(stops.max())
        prompts_M = np.repeat(np.arange(num_prompts), lengths)
        columns_M = np.concatenate([np.arange(length) for length in lengths])
        positions_M = columns_M + np.repeat(starts, lengths)
        spots = self._on_device(prompts_M * longest + columns_M)
        positions = self._on_device(positions_M)
        targets = self._on_device(np.asarray(rows, np.int64))
        places = self.cache.places(targets[self._on_device(prompts_M)], positions)
        cos, sin = self._rotary.index_select(0, positions).split(1, 1)
        tokens_M = np.concatenate([context[start:] for context, start in zip(contexts, starts, strict=True)])
        x = self._weights.embedding.index_select(0, self._on_device(tokens_M.astype(np.int64)))
        chosen = self._adapters.chosen(None if adapters_N is None else adapters_N[prompts_M])
        seen = self._seen(starts, longest, num_seen) if any(starts) else None
        # CUDA's kernels for float32 and for masks do not support grouped heads: torch would fall back to T x T scores.
        repeats = group if x.is_cuda and (x.dtype == torch.float32 or seen is not None) else 1
        spread = x.new_zeros(num_prompts * longest, shape.num_key_heads, group, shape.head_size)
        for index, layer in enumerate(self._weights.layers):
            heads, value = self._project(x, layer, cos, sin, chosen[index])
            self.cache.write(index, places, heads[:, :, group], value)
            if index + 1 == shape.num_layers:
                break  # the rest of the last layer is not needed
            spread.index_copy_(0, spots, heads[:, :, :group])
            query = spread.view(num_prompts, longest, shape.num_heads, shape.head_size).transpose(1, 2)
            keys, values = self.cache.read(index, targets, num_seen)
            if repeats > 1:
                keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
            attended = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=seen, is_causal=seen is None, enable_gqa=group > repeats
            )
            attended = attended.transpose(1, 2).reshape(num_prompts * longest, -1).index_select(0, spots)
            x = self._finish_layer(x, attended, layer, chosen[index])

    def _seen(self, starts: Sequence[int], num_queries: int, num_keys: int) -> Tensor:
        """Bool [N, 1, num_queries, num_keys]: query i of a prompt is at position start + i and sees keys up to
        there.
        """
        places = self._on_device(np.asarray(starts)[:, None] + np.arange(num_queries))
        return (torch.arange(num_keys, device=self.device) <= places[:, :, None])[:, None]

    # ------------------------------------------------------------------ rows

    @property
    def max_moved_tokens(self) -> int:
        return self.cache.tokens_per_copy

    def cost(self, lengths_B: np.ndarray) -> int:
        return self.cache.cost(lengths_B)

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        if set(sources).isdisjoint(targets):
            self.share_rows(sources, targets, lengths)
            return
        taken = [
            (to_rows, self.cache.take(from_rows, longest))
            for from_rows, to_rows, longest in self._copies(sources, targets, lengths)
        ]
        for to_rows, part in taken:
            self.cache.put(to_rows, part)

    def share_rows(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        for from_rows, to_rows, longest in self._copies(sources, targets, lengths):
            self.cache.put(to_rows, self.cache.take(from_rows, longest))

    def _copies(
        self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """(rows, their targets, tokens) of rows of similar lengths, at most `tokens_per_copy` together."""
        used = [index for index, length in enumerate(lengths) if length]
        for chosen in plan_passes([lengths[index] for index in used], self.cache.tokens_per_copy):
            members = [used[place] for place in chosen]
            from_rows, to_rows = (np.array([rows[i] for i in members], np.int64) for rows in (sources, targets))
            yield self._on_device(from_rows), self._on_device(to_rows), max(lengths[index] for index in members)

    @property
    def token_bytes(self) -> int:
        return self.cache.token_bytes

    def save_row(self, row: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        return self.cache.save_row(row, num_tokens)

    def load_row(self, row: int, saved: tuple[Tensor, Tensor], num_tokens: int) -> None:
        self.cache.load_row(row, saved, num_tokens)

    def clear_rows(self, rows: Sequence[int]) -> None:
        self.cache.clear_rows(self._on_device(np.asarray(rows, np.int64)))

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
