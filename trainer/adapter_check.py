"""Proof that engines sample with the adapter that they were given.

Owns: `AdapterCheck`: the adapters of the newest versions, the comparison, the sentence. Refuses: publishing.

Before each step some of the batch's own answers are looked at: their log-probs as the engine recorded them, against
those of the base with the adapter of the version that the engine stamped on them, and those of the base alone. It asks
nothing of an engine, so it holds for every engine and every way a version travels. An engine that left the adapter out
agrees with the base; one that is stuck at an older adapter agrees with neither. Nothing can be said where the adapter
makes less difference than rounding does, as in version 0; then there is no harm in it either.

Tokens up to the first change of version in an answer are compared: only these are of one version in every mode of
interruption. All ranks look together. Shapes: N sampled tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch

from areal_like.errors import UserError
from trainer.adapter import weight_parts
from trainer.backends.port import Backend
from trainer.data.batch import MicroBatch, PreparedBatch
from trainer.model.lora import adapter_off
from trainer.model.packed import PackedSequences
from trainer.ranks import Ranks

MAX_SEQUENCES = 4
"""Looked at by each rank before a step."""
SEEN_NATS = 1e-4
"""Root mean square that the adapter must change log-probs by before an engine can be said to leave it out."""
NEAR_BASE = 0.25
"""An engine whose distance from the base is less than this share of the adapter's effect computes with the base."""
STALE_NATS = 0.2
"""Root mean square error that rounding does not explain: an engine that is off by so much, and by half the effect to
twice the effect, has another adapter."""


class AdapterCheck:
    """`remember` after every version, `look` before every step. Collective, on the compute thread.

    num_versions: adapters kept, the newest. fence: called before weights change for a moment.
    """

    def __init__(
        self, policy: Backend, ranks: Ranks, *, num_versions: int, fence: Callable[[], None] = lambda: None
    ) -> None:
        self._policy, self._ranks, self._num_versions, self._fence = policy, ranks, num_versions, fence
        self._kept: OrderedDict[int, list[torch.Tensor]] = OrderedDict()

    def remember(self, version: int) -> None:
        """Keep a copy of this rank's part of the adapter of `version`, which is the present one."""
        self._kept[version] = [part.items.clone() for part in weight_parts(self._policy.parts())]
        while len(self._kept) > self._num_versions:
            self._kept.popitem(last=False)

    def look(self, prepared: PreparedBatch) -> dict[str, float]:
        """Compare answers of one version; nothing where there are none of a version that is kept.

        Returns metrics: adapter_error_nats, the engine's distance from the trainer, and adapter_effect_nats, the
        adapter's own, both root mean squares over tokens. Raises UserError where an engine does not use the adapter.
        """
        micro_batch = prepared.mini_batches[0][0]
        version = self._agree(prepared, micro_batch)
        if version is None:
            return {}
        chosen, behaviour_N, counts_N = _chosen(micro_batch, prepared.version - version)
        device = self._ranks.device
        packed, behaviour_N, counts_N = chosen.to(device), behaviour_N.to(device), counts_N.to(device)
        adapted_N, base_N = self._logprobs(packed, version)
        pairs = ((behaviour_N, adapted_N), (behaviour_N, base_N), (adapted_N, base_N))
        squares = [((a_N - b_N).double().square() * counts_N).sum() for a_N, b_N in pairs]
        summed = self._ranks.sum(torch.stack([*squares, counts_N.double().sum()]))
        error, from_base, effect = (summed[:3] / summed[3]).sqrt().tolist()
        _judge(version, error, from_base, effect)
        return {"adapter_error_nats": error, "adapter_effect_nats": effect}

    def _agree(self, prepared: PreparedBatch, micro_batch: MicroBatch) -> int | None:
        """The kept version that most first tokens of all ranks' sequences are of."""
        known = list(self._kept)
        firsts_S = prepared.version - _first_staleness(micro_batch)
        counts = [float((firsts_S == version).sum()) * (not micro_batch.is_dummy) for version in known]
        summed = self._ranks.sum(torch.tensor(counts, dtype=torch.float64, device=self._ranks.device))
        return known[int(summed.argmax())] if known and float(summed.max()) > 0 else None

    def _logprobs(self, packed: PackedSequences, version: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[N] of base with the adapter of `version`, and of the base alone."""
        present = next(reversed(self._kept))
        with torch.no_grad():
            if version != present:
                self._put(version)
            try:
                adapted_N, _ = self._policy.logprobs(packed, with_entropy=False)
            finally:
                if version != present:
                    self._put(present)
            with adapter_off(self._policy.model):
                base_N, _ = self._policy.logprobs(packed, with_entropy=False)
        return adapted_N, base_N

    def _put(self, version: int) -> None:
        self._fence()
        for part, items in zip(weight_parts(self._policy.parts()), self._kept[version], strict=True):
            part.items.copy_(items)


def _judge(version: int, error: float, from_base: float, effect: float) -> None:
    """Root mean squares in nats. Raises UserError."""
    is_base = effect > SEEN_NATS and from_base < NEAR_BASE * effect
    is_other = error > STALE_NATS and 0.5 * effect < error < 2.0 * effect
    if not is_base and not is_other:
        return
    what = "the engine samples with the base, without the adapter" if is_base else "the engine uses another adapter"
    raise UserError(
        f"{what}: answers stamped with version {version} differ by {error:.2g} nats from that version"
        f" and by {from_base:.2g} nats from the base (root mean square of the tokens' log-probs)",
        where="rollout.engine",
        remedy="use an engine that loads the versions it is given, or lora: null",
    )


def _first_staleness(micro_batch: MicroBatch) -> np.ndarray:
    """Staleness [S] of the first sampled token of each sequence."""
    sequence_N = micro_batch.packed.sequence_N.numpy()
    _, first_S = np.unique(sequence_N, return_index=True)
    staleness_S: np.ndarray = micro_batch.inputs.staleness_N.numpy()[first_S].astype(np.int64)
    return staleness_S


def _chosen(micro_batch: MicroBatch, staleness: int) -> tuple[PackedSequences, torch.Tensor, torch.Tensor]:
    """Some sequences that begin with this staleness, packed; what the engine recorded [N], and which tokens count [N].

    Where there are none: any one, of which no token counts.
    """
    packed, inputs = micro_batch.packed, micro_batch.inputs
    sequence_N = packed.sequence_N.numpy()
    firsts_S = _first_staleness(micro_batch)
    wanted = np.flatnonzero((firsts_S == staleness) & (not micro_batch.is_dummy))[:MAX_SEQUENCES]
    members = wanted if len(wanted) else np.array([0])
    ends_S = np.cumsum(packed.lengths)
    is_target_T = np.zeros(packed.num_tokens, np.bool_)
    is_target_T[packed.sources_N.numpy() + 1] = True
    tokens, masks, behaviour, counts = [], [], [], []
    for index in members:
        span = slice(ends_S[index] - packed.lengths[index], ends_S[index])
        tokens.append(packed.tokens_T.numpy()[span])
        masks.append(is_target_T[span])
        is_own_N = sequence_N == index
        behaviour.append(inputs.behaviour_N.numpy()[is_own_N])
        is_first_version = inputs.staleness_N.numpy()[is_own_N] == staleness
        counts.append(np.logical_and.accumulate(is_first_version))
    return (
        PackedSequences.build(tokens, masks),
        torch.from_numpy(np.concatenate(behaviour)),
        torch.from_numpy(np.concatenate(counts)),
    )
