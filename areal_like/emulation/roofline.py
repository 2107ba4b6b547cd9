"""How long machines take: a roofline of GPU and model, or what a run measured. Shared by simulator and emulation.

Owns: `Costs` (the port), `Roofline` and its constants, `Measured`. Refuses: events, lengths, who waits.

Roofline. A decode step of a worker reads all weights and the keys and values of all its sequences, or is bound by
arithmetic, and never takes less than a floor (launches, scheduling, sampling, detokenising):

    decode_s = max(floor, (weights + kv_bytes) / (tp * bandwidth * e_b), 2 N batch / (tp * flops * e_p)) + tp reductions

How many sequences a worker decodes is a question of the cache: their tokens at the time, not what they will grow to.

Training costs 6 N FLOPs a token (8 with activations recomputed), 2 N more where proximal log-probs are recomputed, and
attention 2 x layers x hidden x length^2 forward (causal), three or four times that with the backward pass, over
flops * mfu (arXiv 2205.05198, section 4.1, counts the same way). An update reads and writes AdamW's state, and
gradients and weights cross the network once:

    update_s = 28 N / (gpus * bandwidth * e_b) + 6 N / network
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from areal_like.emulation.machines import Gpu, Model

CACHE_SHARE = 0.85
"""Share of a GPU's memory an engine fills."""


class Costs(Protocol):
    """Seconds of everything a simulated machine does."""

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """One decode step of one worker: a token for each of `batch` sequences that hold `context_tokens` in all."""
        ...

    def prefill_s(self, tokens: float) -> float:
        """Prefill of so many tokens on one worker."""
        ...

    def stage_s(self) -> float:
        """Bringing a version next to a worker's engine, while it generates."""
        ...

    def swap_s(self) -> float:
        """The pause in which weights change, without the prefill after it."""
        ...

    def train_s(self, lengths: Sequence[int], imbalance: float, updates: int) -> float:
        """One step on these sequences. imbalance: the heaviest rank's tokens over the mean, at least 1."""
        ...

    def max_sequences(self, mean_context: float) -> int:
        """Sequences that fit the cache of one worker at this mean number of tokens each."""
        ...

    @property
    def slots(self) -> int:
        """Sequences a worker decodes at once at most, whatever its cache holds."""
        ...

    @property
    def cache_tokens(self) -> float:
        """Prompts' and answers' tokens that one worker's cache holds; infinite where that is no limit."""
        ...

    @property
    def trainer_ranks(self) -> int:
        """Shares a batch is dealt into."""
        ...


@dataclass(frozen=True)
class Efficiencies:
    """What is reached of a data sheet; each with its source."""

    decode_floor_s: float = 3e-3
    """Shortest decode step, whatever the model: launches, scheduling, sampling, detokenising. A 0.6B model with CUDA
    graphs takes 2.64 ms between tokens (sgl-project/sglang, pull request 40346); our benchmarks sweep it, since it
    decides most of what asynchrony gains."""
    bandwidth: float = 0.65
    """Share of the memory bandwidth in decoding. Llama-3-8B (16.1 GB of weights), one sequence, takes 7.06 to 7.35 ms a
    step with CUDA graphs (sgl-project/sglang, pull request 1401), which is 65 to 68 % of an H100's 3.35 TB/s."""
    train_mfu: float = 0.43
    """Share of the FLOP/s in training: the mean of what arXiv 2505.24298 reports with dynamic batching (section 7.5:
    388 to 455 of an H800's 989 TFLOP/s)."""
    step_overhead_s: float = 10.0
    """Per trainer step: collecting, dealing out, resharding and publishing weights. A guess; not used where devices are
    emulated: there the system does all this itself."""
    reduction_s: float = 8e-6
    """One all-reduce of a decode step between the GPUs of a worker; two a layer. Of the usual order within a node."""
    prefill_mfu: float = 0.5
    """Share of the FLOP/s in prefill: of the usual order, not measured. Prefill is about a hundredth of the work."""


SHARES = ("bandwidth", "train_mfu", "prefill_mfu")
"""Efficiencies that are shares of a data sheet's figure: above 0, at most 1. The others are seconds, from 0 on."""
ADAMW_BYTES = 28
"""Read and written per parameter by an update: gradient, parameter and two moments in, the latter three out."""
EXCHANGED_BYTES = 6
"""Sent per parameter and update: a float32 gradient reduced, a bfloat16 weight gathered."""


@dataclass(frozen=True)
class Roofline:
    """GPUs that reach a share of their data sheet."""

    gpu: Gpu
    model: Model
    tp: int
    """GPUs of one rollout worker."""
    trainer_gpus: int
    reached: Efficiencies = Efficiencies()
    is_recomputing_logprobs: bool = True
    is_recomputing_activations: bool = True
    slots: int = 1024
    """Sequences a worker takes at most, whatever its memory holds."""

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """See the module."""
        memory_s = self._weights_s + context_tokens * self._cached_s
        return max(self._floor_s, memory_s, batch * self._token_s) + self._reductions_s

    @cached_property
    def _floor_s(self) -> float:
        return self.reached.decode_floor_s

    @cached_property
    def _weights_s(self) -> float:
        """Reading all weights."""
        return self.model.weight_bytes * self._byte_s

    @cached_property
    def _cached_s(self) -> float:
        """Reading one token of the cache."""
        return self.model.kv_bytes_per_token * self._byte_s

    @cached_property
    def _byte_s(self) -> float:
        """Reading one byte of weights or cache."""
        return 1.0 / (self.tp * self.gpu.bandwidth * self.reached.bandwidth)

    @cached_property
    def _token_s(self) -> float:
        """The arithmetic of one token's forward pass."""
        return 2 * self.model.parameters / (self.tp * self.gpu.flops * self.reached.prefill_mfu)

    @cached_property
    def _reductions_s(self) -> float:
        return 2 * self.model.layers * self.reached.reduction_s if self.tp > 1 else 0.0

    def prefill_s(self, tokens: float) -> float:
        """2 N FLOPs a token."""
        return tokens * self._token_s

    def stage_s(self) -> float:
        """Each GPU of a worker receives its share over its own network card."""
        return self.model.weight_bytes / self.tp / self.gpu.network

    def swap_s(self) -> float:
        """From host memory into the GPU."""
        return self.model.weight_bytes / self.tp / self.gpu.host_link

    def forward_flops(self, lengths: Sequence[int]) -> float:
        """Of one pass over these sequences: 2 N a token, and attention by the square of the length."""
        import numpy as np  # settings import this module in every process, also where nothing is emulated

        found = np.asarray(lengths, dtype=np.float64)
        tokens, squares = float(found.sum()), float(found @ found)
        return 2 * self.model.parameters * tokens + 2 * self.model.layers * self.model.hidden * squares

    def compute_s(self, forward_flops: float, passes: float) -> float:
        """All of the trainer's GPUs together, evenly. passes: a backward pass counts as two."""
        return passes * forward_flops / (self.trainer_gpus * self.gpu.flops * self.reached.train_mfu)

    def update_s(self) -> float:
        """One optimizer update; see the module."""
        moved_bytes, sent_bytes = ADAMW_BYTES * self.model.parameters, EXCHANGED_BYTES * self.model.parameters
        memory_s = moved_bytes / (self.trainer_gpus * self.gpu.bandwidth * self.reached.bandwidth)
        return memory_s + (sent_bytes / self.gpu.network if self.trainer_gpus > 1 else 0.0)

    @property
    def gradient_passes(self) -> float:
        """Forward, backward, and forward again where activations are recomputed."""
        return 3.0 + self.is_recomputing_activations

    def train_s(self, lengths: Sequence[int], imbalance: float, updates: int) -> float:
        """See the module; mini-batches divide the same work."""
        compute_s = self.compute_s(self.forward_flops(lengths), self.gradient_passes + self.is_recomputing_logprobs)
        return compute_s * imbalance + updates * self.update_s() + self.reached.step_overhead_s

    def max_sequences(self, mean_context: float) -> int:
        """What the memory left by the weights holds; at least one."""
        return max(1, min(self.slots, int(self.cache_tokens / mean_context)))

    @property
    def cache_tokens(self) -> float:
        """What the memory left by the weights holds."""
        room = CACHE_SHARE * self.gpu.memory * self.tp - self.model.weight_bytes
        return room / self.model.kv_bytes_per_token

    @property
    def trainer_ranks(self) -> int:
        """One per GPU."""
        return self.trainer_gpus


@dataclass(frozen=True)
class Measured:
    """What a run of this machine showed: straight lines through its own figures (calibrate.py)."""

    decode_step_s: float
    """A decode step without sequences."""
    decode_sequence_s: float
    """Each sequence of a step adds this."""
    prefill_token_s: float
    pause_s: float
    staging_s: float
    train_token_s: float
    train_step_s: float
    """Per step, whatever its tokens."""
    slots: int

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """A straight line in the batch: short contexts."""
        return self.decode_step_s + batch * self.decode_sequence_s

    def prefill_s(self, tokens: float) -> float:
        """A straight line."""
        return tokens * self.prefill_token_s

    def stage_s(self) -> float:
        """As measured."""
        return self.staging_s

    def swap_s(self) -> float:
        """As measured."""
        return self.pause_s

    def train_s(self, lengths: Sequence[int], imbalance: float, updates: int) -> float:
        """A straight line; imbalance is in the measurement."""
        return self.train_step_s + sum(lengths) * self.train_token_s

    def max_sequences(self, mean_context: float) -> int:
        """The engine's slots."""
        return self.slots

    @property
    def cache_tokens(self) -> float:
        """No limit: the slots are."""
        return math.inf

    @property
    def trainer_ranks(self) -> int:
        """One process."""
        return 1


def smallest_tp(gpu: Gpu, model: Model) -> int:
    """GPUs a worker needs so that weights take at most a quarter of their memory: a power of two."""
    tp = 1
    while model.weight_bytes / tp > 0.25 * gpu.memory:
        tp *= 2
    return tp
