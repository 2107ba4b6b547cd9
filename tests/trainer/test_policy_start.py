"""How models of the trainer are loaded, and errors while they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from trainer import policy_start
from trainer.backends.fsdp_descriptor import FSDP
from trainer.backends.port import Setup
from trainer.config import TrainerSettings
from trainer.model.attention import AttentionChoice
from trainer.model.model import load_causal_lm
from trainer.model.sequence_group import SequenceGroup
from trainer.peer_errors import RankLost
from trainer.policy_start import load_fixed, ready_backend
from trainer.ranks import Ranks


def setup_of() -> Setup:
    return Setup(TrainerSettings(), 1.0, num_steps=5, attention=AttentionChoice("sdpa", "test"), ranks=Ranks.alone())


def test_a_teacher_whose_heads_the_ranks_cannot_share_is_refused_before_the_first_step(prepared: Path) -> None:
    setup, group = setup_of(), SequenceGroup(0, 3, group=None)  # type: ignore[arg-type]
    setup.ranks.sequence_group = group
    with pytest.raises(UserError, match="3 ranks cannot share the model's 4 attention heads equally"):
        load_fixed(prepared, FSDP, setup, device="cpu")


def test_a_rank_that_is_lost_while_a_full_model_is_distributed_is_reported_as_lost(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: Any) -> Any:
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    monkeypatch.setattr(policy_start, "make_backend", make)
    with pytest.raises(RankLost, match="lost while loading the model"):
        ready_backend(FSDP, load_causal_lm(prepared), replace(setup_of(), source=None))
