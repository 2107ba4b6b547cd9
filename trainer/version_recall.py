"""Log-probs of a step's tokens under the versions that sampled them, computed by the trainer.

It finds the versions that a step needs, computes with their weights, and restores the current ones. Versions are kept
in past_versions.py; objectives/versions.py uses the log-probs.

"Version" means the weights that engines received, rounded to their dtype. If that is float32, the current version is
the policy itself, and the tokens that it sampled need no separate pass. With an adapter (`trainer.lora`) only the
adapter is kept, and the layers it applies to are rounded while it computes.

Versions are the same on all ranks: one that a single rank dropped, for lack of memory, is not used by any. A resumed
trainer only has the version of its checkpoint.

Cost: one forward pass over the sequences that have a token of an older version, for each such version; with the balance
heuristic, over all sequences of the step.

Shapes: N sampled tokens of one micro-batch, S sequences of it, M sampled tokens of some of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from areal_like.settings import DType
from trainer.backends.port import Backend, Setup
from trainer.data.batch import MicroBatch, PreparedBatch
from trainer.export import TORCH_DTYPES
from trainer.model.lora import rounded
from trainer.objectives.port import Needs, Recalled
from trainer.past_versions import PastVersions, Weights
from trainer.step_advantages import Place

MEGABYTE = 1e6


class VersionRecall:
    """Recalls versions: `remember` every version; `look` at a batch before its step. On the compute thread; `look` is
    collective.

    dtype: of the weights that engines receive. fence: called before weights change. needs: of the loss.
    """

    def __init__(self, policy: Backend, setup: Setup, *, dtype: DType, fence: Callable[[], None], needs: Needs) -> None:
        settings = setup.settings.version_logprobs
        assert settings is not None
        self._policy, self._ranks, self._fence, self._needs = policy, setup.ranks, fence, needs
        self._dtype, self._has_adapter = TORCH_DTYPES[dtype], setup.settings.lora is not None
        self._past = PastVersions(settings.keep, int(settings.memory_mb * MEGABYTE))
        self._num_passes = 0

    def remember(self, version: int) -> None:
        """Keep this rank's part of the policy as `version`."""
        dtype = torch.float32 if self._has_adapter else self._dtype
        own = self._policy.own_weights().items()
        self._past.add(version, {name: one.to("cpu", dtype, copy=True).contiguous() for name, one in own})

    def look(self, prepared: PreparedBatch) -> PreparedBatch:
        """Compute the log-probs; returns the batch with `recalled` in the inputs of its micro-batches."""
        held = self._held_by_all(list(prepared.tokens_of_version))
        stands_for_itself = {prepared.version} if self._dtype == torch.float32 else set()
        wanted = sorted(held - stands_for_itself, reverse=True)
        finders = {
            (number, place): _Finder(micro_batch, prepared, held, wanted, self._ranks.device, self._needs)
            for number, mini_batch in enumerate(prepared.mini_batches)
            for place, micro_batch in enumerate(mini_batch)
        }
        self._num_passes = 0
        if wanted:
            self._compute(wanted, finders)
        mini_batches = tuple(
            tuple(
                replace(one, inputs=replace(one.inputs, recalled=finders[number, place].result()))
                for place, one in enumerate(mini_batch)
            )
            for number, mini_batch in enumerate(prepared.mini_batches)
        )
        return replace(prepared, mini_batches=mini_batches)

    def metrics(self) -> dict[str, float]:
        """Number and size of kept versions, and passes of the last step, of this rank."""
        held = len(self._past.held)
        return {
            "versions_held": float(held),
            "versions_mb": self._past.num_bytes / MEGABYTE,
            "version_passes": float(self._num_passes),
        }

    def _held_by_all(self, versions: Sequence[int]) -> set[int]:
        known = set(self._past.held)
        is_here = torch.tensor([float(one in known) for one in versions], device=self._ranks.device)
        num_ranks = self._ranks.sum(is_here).tolist()
        return {one for one, count in zip(versions, num_ranks, strict=True) if count == self._ranks.size}

    def _compute(self, wanted: Sequence[int], finders: Mapping[Place, _Finder]) -> None:
        """Run the passes of every version, the same number on each rank."""
        places = list(finders)
        members = [[finders[place].members_of(version) for place in places] for version in wanted]
        is_needed = torch.tensor([[float(bool(one)) for one in row] for row in members], device=self._ranks.device)
        is_needed = self._ranks.sum(is_needed)
        with torch.no_grad(), self._weights_kept():
            for row, (version, weights) in enumerate(self._past.walk(wanted)):
                self._put(weights)
                for column, place in enumerate(places):
                    if is_needed[row, column] > 0:
                        finders[place].take(version, members[row][column], self._policy)
                        self._num_passes += 1

    @contextlib.contextmanager
    def _weights_kept(self) -> Iterator[None]:
        """Restore the current weights afterwards, bit for bit."""
        is_same = self._dtype == torch.float32 or self._has_adapter
        present: Weights = self._past.newest()
        if not is_same:
            present = {name: one.to("cpu", copy=True) for name, one in self._policy.own_weights().items()}
        try:
            with rounded(self._policy.model, self._dtype) if self._has_adapter else contextlib.nullcontext():
                yield
        finally:
            self._put(present)

    @torch.no_grad()
    def _put(self, weights: Weights) -> None:
        self._fence()
        for name, own in self._policy.own_weights().items():
            own.copy_(weights[name])


class _Finder:
    """Collects the log-probs of one micro-batch."""

    def __init__(
        self,
        micro_batch: MicroBatch,
        prepared: PreparedBatch,
        held: set[int],
        wanted: Sequence[int],
        device: torch.device,
        needs: Needs,
    ) -> None:
        self._micro_batch, self._device = micro_batch, device
        self._versions_N = prepared.version - micro_batch.inputs.staleness_N.numpy().astype(np.int64)
        self._sequence_N = micro_batch.packed.sequence_N.numpy()
        self._is_recalled_N = np.isin(self._versions_N, list(wanted))
        self._is_missing_N = ~np.isin(self._versions_N, list(held))
        counts = prepared.tokens_of_version
        num_tokens = sum(counts.values())
        self._shares = {version: counts[version] / num_tokens for version in wanted}
        self._start_share = (num_tokens - sum(counts[version] for version in wanted)) / num_tokens
        self._own_N = torch.zeros(len(self._versions_N), device=device)
        self._mixture_N = torch.full_like(self._own_N, -math.inf) if needs.mixture else None

    def members_of(self, version: int) -> list[int]:
        """Return the sequences that need a pass of `version`."""
        if self._micro_batch.is_dummy:
            return []
        if self._mixture_N is not None:
            return list(range(len(self._micro_batch.packed.lengths)))
        found: list[int] = np.unique(self._sequence_N[self._versions_N == version]).tolist()
        return found

    def take(self, version: int, members: Sequence[int], policy: Backend) -> None:
        """Compute with the weights of `version`, which are loaded. Without members the pass only takes part in the
        collectives of other ranks."""
        packed, places_M = self._micro_batch.packed.subset(members or [0])
        logprobs_M, _ = policy.logprobs(packed.to(self._device), with_entropy=False)
        if not members:
            return
        is_own_M = torch.from_numpy(self._versions_N[places_M] == version).to(self._device)
        indices_M = torch.from_numpy(places_M).to(self._device)
        self._own_N[indices_M[is_own_M]] = logprobs_M[is_own_M]
        if self._mixture_N is not None:
            term_M = logprobs_M + math.log(self._shares[version])
            self._mixture_N[indices_M] = self._mixture_N[indices_M].logaddexp(term_M)

    def result(self) -> Recalled:
        """Return the log-probs that were computed."""
        return Recalled(
            own_N=self._own_N,
            is_recalled_N=torch.from_numpy(self._is_recalled_N).to(self._device),
            is_missing_N=torch.from_numpy(self._is_missing_N).to(self._device),
            mixture_N=self._mixture_N,
            start_share=self._start_share,
        )
