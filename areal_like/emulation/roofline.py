"""Costs of devices in seconds: a roofline of GPU and model, or figures measured in a run. Used by simulator and
emulation.

Roofline: the time of a worker's decode step is bound by reading all weights and the keys and values of all its
sequences, or by arithmetic, and is never shorter than a floor (launches, scheduling, sampling, detokenising):

    decode_s = max(floor, (weights + kv_bytes) / (tp * bandwidth * e_b), 2 N batch / (tp * flops * e_p)) + tp reductions

The number of sequences that a worker decodes is limited by the tokens in its cache now, not by their final lengths.

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
    """Seconds that each operation of a simulated machine takes."""

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """One decode step of one worker: a token for each of `batch` sequences with `context_tokens` tokens in
        total.
        """
        ...

    def prefill_s(self, tokens: float) -> float:
        """Prefill of `tokens` tokens on one worker."""
        ...

    def stage_s(self) -> float:
        """Transferring a version to a worker's host while it generates."""
        ...

    def swap_s(self) -> float:
        """The pause for a weight swap, without the prefill after it."""
        ...

    def train_s(self, lengths: Sequence[int], imbalance: float, updates: int) -> float:
        """One step on these sequences. imbalance: the heaviest rank's tokens over the mean, at least 1."""
        ...

    def max_sequences(self, mean_context: float) -> int:
        """Number of sequences of this mean length that fit the cache of one worker."""
        ...

    @property
    def slots(self) -> int:
        """Largest number of sequences that a worker decodes at once, whatever its cache holds."""
        ...

    @property
    def cache_tokens(self) -> float:
        """Prompts' and answers' tokens that one worker's cache holds; infinite if the cache is not a limit."""
        ...

    @property
    def trainer_ranks(self) -> int:
        """Number of ranks that a batch is divided among."""
        ...


@dataclass(frozen=True)
class Efficiencies:
    """Shares of data-sheet figures that are reached in practice, each with its source."""

    decode_floor_s: float = 3e-3
    """Shortest decode step, whatever the model: launches, scheduling, sampling, detokenising. A 0.6B model with CUDA
    graphs takes 2.64 ms between tokens (sgl-project/sglang, pull request 40346); our benchmarks sweep it, since it has
    the largest effect on the gain of asynchrony."""
    bandwidth: float = 0.65
    """Share of the memory bandwidth in decoding. Llama-3-8B (16.1 GB of weights), one sequence, takes 7.06 to 7.35 ms a
    step with CUDA graphs (sgl-project/sglang, pull request 1401), which is 65 to 68 % of an H100's 3.35 TB/s."""
    train_mfu: float = 0.43
    """Share of the FLOP/s in training: the mean of what arXiv 2505.24298 reports with dynamic batching (section 7.5:
    388 to 455 of an H800's 989 TFLOP/s)."""
    step_overhead_s: float = 10.0
    """Seconds per trainer step for collecting, distributing, resharding and publishing. An estimate; not used with
    emulated devices, where the system really does this."""
    reduction_s: float = 8e-6
    """Seconds of one all-reduce of a decode step between the GPUs of a worker, two per layer. A typical value within a
    node."""
    prefill_mfu: float = 0.5
    """Share of the FLOP/s in prefill: a typical value, not measured. Prefill is about a hundredth of the work."""


SHARES = ("bandwidth", "train_mfu", "prefill_mfu")
"""Efficiencies that are shares of a data sheet's figure: above 0, at most 1. The others are seconds, at least 0."""
ADAMW_BYTES = 28
"""Bytes per parameter that an update reads (gradient, parameter, two moments) and writes (parameter, two moments)."""
EXCHANGED_BYTES = 6
"""Bytes per parameter that an update sends: a float32 gradient (reduce) and a bfloat16 weight (gather)."""


@dataclass(frozen=True)
class Roofline:
    """Costs of GPUs that reach a share of their data-sheet figures."""

    gpu: Gpu
    model: Model
    tp: int
    """Number of GPUs of one rollout worker."""
    trainer_gpus: int
    reached: Efficiencies = Efficiencies()
    is_recomputing_logprobs: bool = True
    is_recomputing_activations: bool = True
    slots: int = 1024
    """Largest number of sequences of a worker, whatever its memory holds."""

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """See the formula in the docstring of the module."""
        memory_s = self._weights_s + context_tokens * self._cached_s
        return max(self._floor_s, memory_s, batch * self._token_s) + self._reductions_s

    @cached_property
    def _floor_s(self) -> float:
        return self.reached.decode_floor_s

    @cached_property
    def _weights_s(self) -> float:
        """Seconds to read all weights."""
        return self.model.weight_bytes * self._byte_s

    @cached_property
    def _cached_s(self) -> float:
        """Seconds to read one token of the cache."""
        return self.model.kv_bytes_per_token * self._byte_s

    @cached_property
    def _byte_s(self) -> float:
        """Seconds to read one byte of weights or cache."""
        return 1.0 / (self.tp * self.gpu.bandwidth * self.reached.bandwidth)

    @cached_property
    def _token_s(self) -> float:
        """Seconds of arithmetic of one token's forward pass."""
        return 2 * self.model.parameters / (self.tp * self.gpu.flops * self.reached.prefill_mfu)

    @cached_property
    def _reductions_s(self) -> float:
        return 2 * self.model.layers * self.reached.reduction_s if self.tp > 1 else 0.0

    def prefill_s(self, tokens: float) -> float:
        """Prefill at 2 N FLOPs per token."""
        return tokens * self._token_s

    def stage_s(self) -> float:
        """Each GPU of a worker receives its share over its own network card."""
        return self.model.weight_bytes / self.tp / self.gpu.network

    def swap_s(self) -> float:
        """Copy from host memory into the GPU."""
        return self.model.weight_bytes / self.tp / self.gpu.host_link

    def forward_flops(self, lengths: Sequence[int]) -> float:
        """FLOPs of one forward pass over these sequences: 2 N per token, and attention quadratic in the length."""
        import numpy as np  # settings import this module in every process, even if nothing is emulated

        found = np.asarray(lengths, dtype=np.float64)
        tokens, squares = float(found.sum()), float(found @ found)
        return 2 * self.model.parameters * tokens + 2 * self.model.layers * self.model.hidden * squares

    def compute_s(self, forward_flops: float, passes: float) -> float:
        """Seconds on all of the trainer's GPUs with even load. passes: a backward pass counts as two."""
        return passes * forward_flops / (self.trainer_gpus * self.gpu.flops * self.reached.train_mfu)

    def update_s(self) -> float:
        """One optimizer update; the formula is in the module's docstring."""
        moved_bytes, sent_bytes = ADAMW_BYTES * self.model.parameters, EXCHANGED_BYTES * self.model.parameters
        memory_s = moved_bytes / (self.trainer_gpus * self.gpu.bandwidth * self.reached.bandwidth)
        return memory_s + (sent_bytes / self.gpu.network if self.trainer_gpus > 1 else 0.0)

    @property
    def gradient_passes(self) -> float:
        """Passes of a training step: forward, backward, and forward again if activations are recomputed."""
        return 3.0 + self.is_recomputing_activations

    def train_s(self, lengths: Sequence[int], imbalance: float, updates: int) -> float:
        """One step; the formula is in the module's docstring. Mini-batches divide the same work."""
        compute_s = self.compute_s(self.forward_flops(lengths), self.gradient_passes + self.is_recomputing_logprobs)
        return compute_s * imbalance + updates * self.update_s() + self.reached.step_overhead_s

    def max_sequences(self, mean_context: float) -> int:
        """Number of sequences that fit the memory left by the weights; at least one."""
        return max(1, min(self.slots, int(self.cache_tokens / mean_context)))

    @property
    def cache_tokens(self) -> float:
        """Number of tokens that fit the memory left by the weights."""
        room = CACHE_SHARE * self.gpu.memory * self.tp - self.model.weight_bytes
        return room / self.model.kv_bytes_per_token

    @property
    def trainer_ranks(self) -> int:
        """One rank per GPU."""
        return self.trainer_gpus


@dataclass(frozen=True)
class Measured:
    """Costs measured in a run on this machine: linear fits to its figures (calibrate.py)."""

    decode_step_s: float
    """Seconds of a decode step without sequences."""
    decode_sequence_s: float
    """Seconds that each sequence adds to a step."""
    prefill_token_s: float
    pause_s: float
    staging_s: float
    train_token_s: float
    train_step_s: float
    """Seconds of a step that do not depend on its tokens."""
    slots: int

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """Linear in the batch size; valid for short contexts."""
        return self.decode_step_s + batch * self.decode_sequence_s

    def prefill_s(self, tokens: float) -> float:
        """Linear in the number of tokens."""
        return tokens * self.prefill_token_s

    def stage_s(self) -> float:
        """The measured time."""
        return self.staging_s

    def swap_s(self) -> float:
        """The measured time."""
        return self.pause_s

    def train_s(self, lengths: Sequence[int], imbalance: float, updates: int) -> float:
        """Linear in the number of tokens; the measurement includes imbalance."""
        return self.train_step_s + sum(lengths) * self.train_token_s

    def max_sequences(self, mean_context: float) -> int:
        """Number of the engine's slots."""
        return self.slots

    @property
    def cache_tokens(self) -> float:
        """Infinite: only the slots limit."""
        return math.inf

    @property
    def trainer_ranks(self) -> int:
        """One rank."""
        return 1


def smallest_tp(gpu: Gpu, model: Model) -> int:
    """Smallest power of two of GPUs per worker of which the weights take at most a quarter of the memory."""
    tp = 1
    while model.weight_bytes / tp > 0.25 * gpu.memory:
        tp *= 2
    return tp
