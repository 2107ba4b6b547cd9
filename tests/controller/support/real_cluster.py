"""The virtual cluster with the real ledger on disk in addition to the model; restarts read the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from real_ledger import apply_all, segment_of
from virtual_cluster import VirtualCluster

from controller.coordinator.effects import Effect, PurgePayloads, SendBatch, SendLeases
from controller.ledger.ledger import Ledger


class RealCluster(VirtualCluster):
    """One run; `folder` is that of the ledger."""

    def __init__(self, *args: Any, folder: Path, **kwargs: Any) -> None:
        self.folder = folder
        self.real = Ledger(folder, segment_bytes=3000)
        super().__init__(*args, **{**kwargs, "mirror": self._mirror})

    def _mirror(self, entries: list[tuple[Effect, list[int] | None]]) -> None:
        apply_all(self.real, entries)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, PurgePayloads):
            self.real.purge(effect.covered_step)
        elif isinstance(effect, SendBatch):
            samples = self.real.batch_samples(effect.groups, effect.reused)
            groups = sorted((*effect.groups, *effect.reused), key=lambda group: group.group_id)
            assert [(s.group_id, s.sample_index) for s in samples] == [
                (group.group_id, index) for group in groups for index in group.sample_indices
            ]
            reused = {group.group_id for group in effect.reused}
            assert all(sample.is_reused == (sample.group_id in reused) for sample in samples)
            assert all(sample.reward is not None for sample in samples)
        elif isinstance(effect, SendLeases):
            for order in effect.leases:
                if order.purpose == "train":
                    facts = self.ledger.groups[order.group_id].samples.get(order.sample_index)
                    expected = segment_of(facts.partial if facts else [])
                    prefix = self.real.prefix(order.group_id, order.sample_index)
                    assert prefix.tokens_R.tolist() == expected.tokens_R.tolist(), "tokens lost, repeated or swapped"
                    assert prefix.versions_R.tolist() == expected.versions_R.tolist()
        super()._carry_out(effect)

    def restart(self, load: Any = None) -> None:
        self.real.close()
        self.real = Ledger(self.folder, segment_bytes=3000)
        expected = self.ledger.load()  # which deletes no tokens
        assert self.real.load().stored <= expected.stored
        assert msgspec.structs.replace(self.real.load(), stored=expected.stored) == expected
        self.ledger.is_purged = True
        super().restart(self.real.load)
