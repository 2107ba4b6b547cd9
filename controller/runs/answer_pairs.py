"""Selects training answers for the report: of the newest step, for each prompt those of highest and lowest reward."""

from __future__ import annotations

from collections.abc import Sequence

from areal_like.errors import UserError
from controller.report.answers import MAX_CHARS, Answer, AnswerPair
from controller.report.overview import text
from controller.run_folder.run_folder import RunFolder
from controller.runs.sample_groups import GroupReader, GroupRow
from controller.runs.sample_rows import Sample

NUM_PROMPTS = 3


def training_answers(folder: RunFolder) -> list[AnswerPair]:
    """The answers to show; empty if the run has no ledger that can be read, or its tokens are purged.

    Prompts whose answers differ in reward come first, because the others taught nothing.
    """
    reader = GroupReader(folder)
    try:
        stored = [row for row in reader.groups() if row.step is not None and row.is_stored]
        newest = max((row.step or 0 for row in stored), default=0)
        chosen = sorted((row for row in stored if row.step == newest), key=_order)[:NUM_PROMPTS]
        found = [_pair(newest, reader.answers(row.group_id)) for row in chosen]
    except (UserError, OSError):  # the report names what cannot be read, in its diagnosis
        return []
    return [pair for pair in found if pair is not None]


def _order(row: GroupRow) -> tuple[float, int]:
    spread = (row.highest or 0.0) - (row.lowest or 0.0)
    return -spread, row.group_id


def _pair(step: int, samples: Sequence[Sample]) -> AnswerPair | None:
    """The answers with the highest and the lowest reward, or one if all are equal."""
    scored = [sample for sample in samples if sample.reward is not None and _text(sample)]
    if not scored:
        return None
    best, worst = max(scored, key=_reward), min(scored, key=_reward)
    shown = [best] if _reward(best) == _reward(worst) else [best, worst]
    return AnswerPair(
        prompt=text(next((sample.prompt for sample in samples if sample.prompt), ""), MAX_CHARS),
        answers=[
            Answer.of(f"{sample.name}, step {step}, version {sample.versions}", sample.reward, _text(sample))
            for sample in shown
        ],
    )


def _reward(sample: Sample) -> float:
    return sample.reward if sample.reward is not None else 0.0


def _text(sample: Sample) -> str:
    """The answer; for an episode the text of its main trajectory."""
    if sample.trajectories:
        return "".join(span.text for span in sample.trajectories[0].spans)
    return sample.answer
