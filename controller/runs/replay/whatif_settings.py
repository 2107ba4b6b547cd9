"""Which settings `areal-like whatif` accepts: of the trainer on recorded batches, and of the schedule.

Others are refused with one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from areal_like.errors import UserError
from controller.config.loading import load_config
from controller.run_folder.run_folder import RunFolder

REPLAYED = (
    "loss", "advantage", "optimizer", "mini_batches", "passes_per_batch", "micro_batch_tokens", "lr_by_ess", "critic",
    "lora", "gradient_cosine",
)  # fmt: skip
"""Sections of `trainer` that change what a step computes from the same samples."""
SCHEDULE = (
    "mode", "staleness.max_staleness", "staleness.on_stale", "rollout.num_workers", "rollout.engine.num_slots",
    "rollout.queue_samples", "rollout.interruption", "rollout.routing",
)  # fmt: skip
"""Keys that change when samples are generated and used."""
SAMPLED = (
    "sampling", "model", "data", "warm_start", "curriculum", "group_size", "groups_per_step", "num_steps",
    "filter_zero_signal", "seed", "dynamic_batch", "replay_buffer", "rollout",
)  # fmt: skip


class Answer(Enum):
    """What answers a question about a key."""

    REPLAY = "replay"
    SIMULATION = "simulation"


def answer_of(overrides: Sequence[str]) -> Answer:
    """What answers the question. Raises UserError: a setting that neither can answer, or both kinds of settings."""
    found = {_answer(text) for text in overrides}
    if len(found) > 1:
        what = (
            "a changed schedule produces batches that differ from the recorded ones, on which changed trainer settings "
            "would be replayed"
        )
        raise UserError(
            what, where=" ".join(overrides), remedy="change either the schedule or the trainer settings, but not both"
        )
    return found.pop()


def _answer(text: str) -> Answer:
    key, equals, _ = text.partition("=")
    parts = key.split(".")
    if not equals or not key:
        raise UserError(
            f"{text!r} is not of the form key.path=value",
            where="whatif",
            remedy="write, for example, trainer.loss.eps_high=0.4",
        )
    if parts[0] == "trainer" and len(parts) > 1 and parts[1] in REPLAYED:
        return Answer.REPLAY
    if any(key == one or key.startswith(f"{one}.") for one in SCHEDULE):
        return Answer.SIMULATION
    what, remedy = _refusal(parts)
    raise UserError(what, where=key, remedy=remedy)


def _refusal(parts: Sequence[str]) -> tuple[str, str]:
    """Why a setting is refused, and what to do instead."""
    run = "start a run with this setting"
    if ".".join(parts[:2]) in ("trainer.teacher", "trainer.version_logprobs"):
        return "this setting needs log-probs of other models or versions for each sample, which were not recorded", run
    if parts[0] == "trainer":
        return (
            "this setting does not change the results of a step, but only where or how fast it is computed or what is "
            "stored",
            run,
        )
    if parts[0] in SAMPLED:
        return "this setting changes what is sampled, but only the recorded samples are available", run
    if parts[0] == "reward":
        what = "this setting changes the scores of samples, but only the recorded scores are available"
        return what, "use areal-like score to score recorded answers again"
    return "this setting changes neither the results of a step nor when samples are used", run


def sections_of(overrides: Sequence[str]) -> set[str]:
    """Sections of `trainer` that overrides change.

    Example:
        >>> sections_of(["trainer.loss.eps_high=0.4", "trainer.mini_batches=2"]) == {"loss", "mini_batches"}
        True
    """
    return {text.partition("=")[0].split(".")[1] for text in overrides}


def changed_settings(folder: RunFolder, recorded: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The recorded settings of the trainer with other values, checked together with the run's config. Raises UserError.

    Sections that are not named stay as recorded: the config may have been edited after the run.
    """
    config = load_config(str(folder.root), overrides).config
    dumped = config.trainer.model_dump(mode="json")
    return {**recorded, **{section: dumped[section] for section in sections_of(overrides)}}
