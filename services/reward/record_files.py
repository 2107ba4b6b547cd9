"""Names the files in which judges record answers and count their budget (areal_like/external/records.py), where the
options name none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_like.external.records import records_file
from areal_like.external.settings import ModelEndpointOptions
from services.reward.config import RewardSettings, ScorerSettings, scorer_names
from services.reward.scorer_registry import SCORERS

SHARED: dict[str, Any] = {"on_exhausted": "fail"}
"""A service that several runs share cannot end them: its judges' requests fail."""


def with_record_files(reward: RewardSettings, run_dir: Path | None) -> RewardSettings:
    """The settings of a service with the files of its judges. run_dir: folder of the run; None: a shared service, whose
    judges record only where `records` names a file."""
    scorers = list(reward.scorers)
    for index, name in _asking_models(reward.scorers):
        if run_dir is None:
            scorers[index] = _with(scorers[index], SHARED)
        elif scorers[index].options.get("records") is None:
            scorers[index] = _with(scorers[index], {"records": str(records_file(run_dir, name))})
    return reward.model_copy(update={"scorers": tuple(scorers)})


def with_file_next_to(reward: RewardSettings, target: Path) -> RewardSettings:
    """The settings for scoring a file: answers of judges are recorded next to the verdicts."""
    scorers = list(reward.scorers)
    for index, _ in _asking_models(reward.scorers):
        if scorers[index].options.get("records") is None:
            scorers[index] = _with(scorers[index], {"records": f"{target}.external.jsonl"})
    return reward.model_copy(update={"scorers": tuple(scorers)})


def _asking_models(scorers: tuple[ScorerSettings, ...]) -> Iterator[tuple[int, str]]:
    for index, (name, scorer) in enumerate(zip(scorer_names(scorers), scorers, strict=True)):
        kind = SCORERS.get(scorer.kind)
        if kind is not None and issubclass(kind.options, ModelEndpointOptions):
            yield index, name


def _with(scorer: ScorerSettings, options: dict[str, Any]) -> ScorerSettings:
    return scorer.model_copy(update={"options": {**scorer.options, **options}})
