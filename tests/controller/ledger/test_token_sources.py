"""Which model sampled which tokens, in the ledger: stored, read back, and recounted by the audit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from ledger_entries import admit, finished, lineage, shipped
from real_ledger import trajectory_of

from areal_like.token_source import TokenSource
from areal_like.trajectory import Segment, Trajectory
from areal_like.turn_checkpoint import TurnCheckpoint
from controller.ledger.audit import audit
from controller.ledger.ledger import Ledger
from controller.ledger.segment_store import pack_sample, pack_segment, unpack_checkpoint, unpack_sample
from controller.ledger.source_audit import declared_models

CONFIG = """
rollout:
  models:
  - {name: judge, source: start}
  - {name: critic, source: policy, trained: false}
"""
ROLES = CONFIG + "  - {name: player, source: policy}\n"


def stamped(*models: str) -> Trajectory:
    """One trained token of each model."""
    made = trajectory_of([0] * len(models))
    start = len(made) - len(models)
    sources = tuple(TokenSource(name, 0, start + at, start + at + 1) for at, name in enumerate(models) if name)
    return msgspec.structs.replace(made, sources=sources)


def test_sources_come_back_from_a_record_and_from_a_checkpoint() -> None:
    made = stamped("player", "", "judge")
    trajectories, _ = unpack_sample(pack_sample((made, stamped("judge")), "text"))
    assert [one.sources for one in trajectories] == [made.sources, stamped("judge").sources]
    given = np.zeros(1, np.int32)
    checkpoint = TurnCheckpoint(
        given_places_G=given, given_tokens_G=given, num_turns=1, state=b"\xc0", sources=made.sources
    )
    found = unpack_checkpoint(pack_segment(Segment.empty(), checkpoint))
    assert found is not None
    assert found.sources == made.sources


@pytest.mark.parametrize(
    ("config", "models", "finding"),
    [
        ("", ("judge",), ""),
        ("{", ("judge",), ""),
        (CONFIG, ("",), ""),
        (CONFIG, ("", "judge"), "trains tokens of judge, although this is not declared as trained"),
        (CONFIG, ("critic",), "trains tokens of critic, although this is not declared as trained"),
        (ROLES, ("player", "player"), ""),
        (ROLES, ("player", ""), "trains tokens of no declared role"),
    ],
)
def test_the_audit_finds_a_model_that_was_trained_and_not_declared_so(
    tmp_path: Path, config: str, models: tuple[str, ...], finding: str
) -> None:
    if config:
        (tmp_path / "config.yaml").write_text(config)
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), admit(0)])
        entry = finished(0, [0] * len(models))
        ledger.apply([msgspec.structs.replace(entry, trajectories=(stamped(*models),)), shipped(1, 0)])
    expected = (f"stamped-versions: group 0 sample 0 {finding}",) if finding else ()
    assert audit(tmp_path).findings == expected


def test_copies_and_frozen_models_are_never_trained(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(ROLES + "  - {name: rival, source: policy, refresh_every: 2}\n")
    found = declared_models(tmp_path)
    assert (found.trained, found.others) == ({"player"}, {"judge", "critic", "rival"})
