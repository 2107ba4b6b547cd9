"""Checks whether a run trained only the models declared as trained, from the sources of the tokens in its samples.

rollout/models/trained.py rejects such samples before they are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from pydantic import ValidationError

from areal_like.encryption.files import read_text
from areal_like.token_source import trained_models
from areal_like.trajectory import Trajectory
from controller.config.run_config import CalledModelSettings


class DeclaredModels(NamedTuple):
    """trained: roles of the policy that are trained; empty: the policy has no roles. others: every other model."""

    trained: frozenset[str]
    others: frozenset[str]


def declared_models(run_dir: Path) -> DeclaredModels:
    """Models declared in a run's config.yaml; None if it declares no models, or cannot be read."""
    try:
        rollout = yaml.safe_load(read_text(run_dir / "config.yaml"))["rollout"]
        models = [CalledModelSettings.model_validate(one) for one in rollout.get("models") or ()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, ValidationError):
        models = []
    trained = frozenset(model.name for model in models if model.is_trained)
    return DeclaredModels(trained, frozenset(model.name for model in models) - trained)


def source_findings(trajectories: Sequence[Trajectory], declared: DeclaredModels) -> Iterator[str]:
    """Problems of one sample, as text that follows its name."""
    for trajectory in trajectories:
        if wrong := trained_models(trajectory.sources, trajectory.loss_mask_T) & declared.others:
            yield f"trains tokens of {', '.join(sorted(wrong))}, although this is not declared as trained"
        if not declared.trained:
            continue
        is_named_T = np.zeros(len(trajectory), np.bool_)
        for source in trajectory.sources:
            is_named_T[source.start : source.end] = source.model in declared.trained
        if bool((trajectory.loss_mask_T & ~is_named_T).any()):
            yield "trains tokens of no declared role"
