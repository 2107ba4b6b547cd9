"""Emulated GPUs, which take the time that a roofline model predicts for a batch, instead of training.

It counts what would be computed and sleeps until it would be done. The weights do not change (they are those of the
tiny model, so that versions are really transferred). trainer/emulated.py determines when a step may begin.

The passes of `TrainStep` are counted as they are called: proximal log-probs, then forward and backward of each
micro-batch. An update is due when the GPU with the heaviest share of its mini-batch would be done, at an absolute
time: a late wake-up does not delay the next update.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from areal_like.emulation.device import Lateness, roofline_of
from areal_like.emulation.settings import EmulationSettings
from areal_like.packing import partition
from trainer.backends.port import ReadMoments, Setup
from trainer.export import named_tensors
from trainer.host_copy import Part, whole_part
from trainer.model.packed import PackedSequences
from trainer.optimizer import UpdateResult, learning_rate

LOGPROB = -1.0


class EmulatedBackend:
    """See trainer.backends.port.Backend."""

    def __init__(self, model: PreTrainedModel, setup: Setup, emulation: EmulationSettings) -> None:
        """Raises UserError for an unknown GPU or model."""
        self.model, self._setup, self._emulation = model, setup, emulation
        self._costs = roofline_of(emulation, is_recomputing_activations=setup.settings.gradient_checkpointing)
        self._forward: list[int] = []
        """Emulated lengths of sequences with a forward pass only, since the last update."""
        self._gradient: list[int] = []
        self.due_s = 0.0
        """When all requested work is done; monotonic."""
        self.lateness = Lateness()

    def begin(self, ready_s: float) -> float:
        """Begin a step when its batch was ready or the previous step was due to end, whichever is later; returns it."""
        self.due_s = max(self.due_s, ready_s)
        return self.due_s

    def logprobs(self, packed: PackedSequences, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return constants, and record the cost of computing them."""
        is_gradient = torch.is_grad_enabled()
        (self._gradient if is_gradient else self._forward).extend(self._lengths(packed))
        logprobs_N = torch.full((len(packed.targets_N),), LOGPROB, requires_grad=is_gradient)
        return logprobs_N, torch.zeros_like(logprobs_N) if with_entropy else None

    def zero_grad(self) -> None:
        """Does nothing: there are no gradients."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Does nothing: its cost was recorded with the forward pass."""

    def update(self, step: int, *, lr_factor: float = 1.0) -> UpdateResult:
        """Sleep until the mini-batch would be trained on."""
        emulated_s = self._compute_s(self._forward, 1.0) + self._compute_s(self._gradient, self._costs.gradient_passes)
        self._forward, self._gradient = [], []
        self.due_s += (emulated_s + self._costs.update_s()) / self._emulation.speedup
        while (left_s := self.due_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self.lateness.add(-left_s)
        settings = self._setup.settings.optimizer
        return UpdateResult(0.0, lr_factor * learning_rate(settings, step, self._setup.num_steps), True)

    def move(self, device: torch.device) -> int:
        """Move nothing: the tiny model stays where it is."""
        return 0

    def full_weights(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
        """Return the tiny model's weights."""
        return named_tensors(self.model)

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Return nothing: the validation rejects settings that need these weights."""
        return {}

    def own_gradients(self) -> dict[str, torch.Tensor]:
        raise AssertionError("the emulated trainer does not compute gradients")

    def parts(self) -> list[Part]:
        """Return the tiny model's parts; no optimizer runs."""
        return [whole_part(f"weight/{name}", tensor) for name, tensor in named_tensors(self.model).items()]

    def load_moments(self, read: ReadMoments) -> None:
        """Does nothing: there are no moments."""

    def _lengths(self, packed: PackedSequences) -> list[int]:
        """Return the emulated number of tokens of each sequence, prompt and answer."""
        sampled_S = np.bincount(packed.sequence_N.numpy(), minlength=len(packed.lengths))
        found: list[int] = (self._emulation.prompt_tokens + sampled_S * self._emulation.token_scale).tolist()
        return found

    def _compute_s(self, lengths: list[int], passes: float) -> float:
        """Return the emulated seconds of these passes: GPUs wait for the one with the heaviest share."""
        if not lengths:
            return 0.0
        gpus = self._emulation.trainer_gpus
        shares = partition(lengths, gpus)
        heaviest = max(self._costs.forward_flops([lengths[i] for i in share]) for share in shares)
        return self._costs.compute_s(heaviest * gpus, passes)
