"""Checks that engines sample with the adapter that was sent to them.

Before each step some answers of the batch are examined. Their log-probs as the engine recorded them are compared with
those of the version that the engine stamped on them, those of the base alone, and those of an older version, which
changes from step to step. Nothing is requested from an engine, so the check works for every engine and every transport
of versions. An engine that does not apply the adapter agrees with the base, one that did not load the version agrees
with the older one. A large distance from all of them proves nothing, because an engine may compute with lower
precision. Nothing can be concluded either if an adapter makes less difference than rounding, as in version 0; then the
error is harmless. The compared policies are rounded to the dtype of versions, as they were for the engine: small
changes of a weight are lost in bfloat16, and an engine with the right version is then as near to the base.

Tokens up to the first change of version in an answer are compared: only these are of one version in every mode of
interruption. All ranks check together. Shapes: N sampled tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch

from areal_like.errors import UserError
from areal_like.settings import DType
from trainer.adapter import weight_parts
from trainer.backends.port import Backend
from trainer.data.batch import MicroBatch, PreparedBatch
from trainer.export import TORCH_DTYPES
from trainer.model.lora import adapter_off, rounded
from trainer.model.packed import PackedSequences
from trainer.ranks import Ranks

MAX_SEQUENCES = 4
"""Number of sequences that each rank examines before a step."""
SEEN_NATS = 1e-4
"""Root mean square of the difference between two policies above which they can be distinguished."""
NEAR = 0.25
"""An engine is taken to compute with another policy if its distance from it is below this share of that policy's
distance from the right one."""


class AdapterCheck:
    """Compares the engines' log-probs. Call `remember` after every version and `look` before every step. Collective, on
    the compute thread.

    num_versions: number of newest adapters to keep. dtype: of the weights of versions. fence: called before weights
    are changed temporarily.
    """

    def __init__(
        self,
        policy: Backend,
        ranks: Ranks,
        *,
        num_versions: int,
        dtype: DType,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy, self._ranks, self._num_versions, self._fence = policy, ranks, num_versions, fence
        self._dtype = TORCH_DTYPES[dtype]
        self._kept: OrderedDict[int, list[torch.Tensor]] = OrderedDict()

    def remember(self, version: int) -> None:
        """Keep a copy of this rank's part of the adapter of `version`, the current one."""
        parts = weight_parts(self._policy.parts())
        self._kept[version] = [part.items.to("cpu", copy=True) for part in parts]  # devices may be shared with engines
        while len(self._kept) > self._num_versions:
            self._kept.popitem(last=False)

    def look(self, prepared: PreparedBatch) -> dict[str, float]:
        """Compare answers of one version; returns no metrics if there are none of a kept version.

        Returns metrics: adapter_error_nats, the engine's distance from the trainer, and adapter_effect_nats, the
        adapter's effect, both root mean squares over tokens. Raises UserError if an engine does not use the adapter.
        """
        micro_batch = prepared.mini_batches[0][0]
        version = self._agree(prepared, micro_batch)
        if version is None:
            return {}
        chosen, behaviour_N, counts_N = _chosen(micro_batch, prepared.version - version)
        device = self._ranks.device
        packed, behaviour_N, counts_N = chosen.to(device), behaviour_N.to(device), counts_N.to(device)
        right_N, others = self._logprobs(packed, version, prepared.step)
        pairs = [(behaviour_N, right_N)]
        for other_N in others.values():
            pairs += [(behaviour_N, other_N), (right_N, other_N)]
        squares = [((a_N - b_N).double().square() * counts_N).sum() for a_N, b_N in pairs]
        summed = self._ranks.sum(torch.stack([*squares, counts_N.double().sum()]))
        error, *distances = (summed[:-1] / summed[-1]).sqrt().tolist()
        for other, near, far in zip(others, distances[::2], distances[1::2], strict=True):
            if far > SEEN_NATS and near < NEAR * far:
                raise _another_policy(version, other, error, near)
        return {"adapter_error_nats": error, "adapter_effect_nats": distances[1]}

    def _agree(self, prepared: PreparedBatch, micro_batch: MicroBatch) -> int | None:
        """Return the kept version that sampled the most first tokens of all ranks' sequences."""
        known = list(self._kept)
        firsts_S = prepared.version - _first_staleness(micro_batch)
        counts = [float((firsts_S == version).sum()) * (not micro_batch.is_dummy) for version in known]
        summed = self._ranks.sum(torch.tensor(counts, dtype=torch.float64, device=self._ranks.device))
        return known[int(summed.argmax())] if known and float(summed.max()) > 0 else None

    def _logprobs(
        self, packed: PackedSequences, version: int, step: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return [N] of `version`, and of what an engine may use instead, by name: the base first."""
        older = [kept for kept in self._kept if kept < version]
        present, others = next(reversed(self._kept)), dict[str, torch.Tensor]()
        with torch.no_grad(), rounded(self._policy.model, self._dtype):
            with adapter_off(self._policy.model):
                others["the base model"] = self._policy.logprobs(packed, with_entropy=False)[0]
            try:
                self._put(version)
                right_N, _ = self._policy.logprobs(packed, with_entropy=False)
                if older:
                    other = older[step % len(older)]
                    self._put(other)
                    others[f"version {other}"] = self._policy.logprobs(packed, with_entropy=False)[0]
            finally:
                self._put(present)
        return right_N, others

    def _put(self, version: int) -> None:
        self._fence()
        for part, items in zip(weight_parts(self._policy.parts()), self._kept[version], strict=True):
            part.items.copy_(items)


def _another_policy(version: int, other: str, error: float, near: float) -> UserError:
    """Return the error. Distances are root mean squares in nats."""
    return UserError(
        f"the engine samples with {other} instead of version {version}: the log-probs of its answers differ by "
        f"{error:.2g} nats from version {version}, but by {near:.2g} nats from {other} "
        "(root mean square over tokens)",
        where="rollout.engine",
        remedy="use an engine that loads the published versions, or set trainer.lora: null",
    )


def _first_staleness(micro_batch: MicroBatch) -> np.ndarray:
    """Return the staleness [S] of the first sampled token of each sequence."""
    sequence_N = micro_batch.packed.sequence_N.numpy()
    _, first_S = np.unique(sequence_N, return_index=True)
    staleness_S: np.ndarray = micro_batch.inputs.staleness_N.numpy()[first_S].astype(np.int64)
    return staleness_S


def _chosen(micro_batch: MicroBatch, staleness: int) -> tuple[PackedSequences, torch.Tensor, torch.Tensor]:
    """Return some sequences that begin with this staleness, packed, the engine's log-probs [N], and a mask [N] of the
    tokens that count.

    If there are none, any sequence is returned, of which no token counts.
    """
    packed, inputs = micro_batch.packed, micro_batch.inputs
    sequence_N = packed.sequence_N.numpy()
    firsts_S = _first_staleness(micro_batch)
    is_wanted_S = (firsts_S == staleness) & (not micro_batch.is_dummy)
    members = np.flatnonzero(is_wanted_S)[:MAX_SEQUENCES].tolist() or [0]
    chosen, places_N = packed.subset(members)
    # tokens up to the first change of version: versions never decrease along an answer (`stamped-versions`)
    counts_N = (inputs.staleness_N.numpy()[places_N] == staleness) & is_wanted_S[sequence_N[places_N]]
    return chosen, inputs.behaviour_N[torch.from_numpy(places_N)], torch.from_numpy(counts_N)
