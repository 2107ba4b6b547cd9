"""Findings about the samples: groups without a signal, and answers that were cut.

Findings about the policy are in learning.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from controller.config.validation.objectives import WITHIN_GROUP
from controller.report.data import RunData, number, series
from controller.report.finding import Finding, Rated, Severity, Weight, figure, percent
from controller.report.learning import MIN_TREND_STEPS, is_learning
from controller.report.signs import trend, window

CUT_NOTABLE = 0.5
CUT_BAD = 0.95
ZERO_SIGNAL_NOTABLE = 0.8
"""Groups whose rewards are all equal have no advantage: four fifths of generation and training are wasted."""
ZERO_SIGNAL_BAD = 0.99
FILTERED_NOTABLE = 0.5
"""With filter_zero_signal: half of generation is discarded."""
NEAR_GREEDY = 0.1
"""Below this temperature, samples of a group are nearly always the same answer."""
SOLVED = 0.5
"""If most groups with equal rewards have the best reward, the prompts are solved, not too hard."""


def find(data: RunData, *, is_collapsed: bool) -> list[Rated]:
    """Reasons why the samples teach nothing. is_collapsed: a collapse is already reported, and equal or cut answers
    follow from it.
    """
    if len(data.steps) < MIN_TREND_STEPS or is_collapsed:
        return []
    signal, cut = _signal(data), _cut(data)
    if cut and signal and signal[0].finding.severity != "info" and not _is_best(data) and not _is_near_greedy(data):
        # A cut answer gets no useful score, so equal rewards follow from it.
        cut = [replace(one, share=one.share + signal[0].share) for one in cut]
    return [*signal, *_filtered(data), *cut]


def _signal(data: RunData) -> list[Rated]:
    """Groups whose rewards are all equal teach nothing."""
    spread = series(data.steps, "advantage_abs_mean")[-window(len(data.steps)) :]
    share, solved = math.nan, math.nan
    if data.samples is not None and data.setting("trainer.advantage.kind", "grpo") in WITHIN_GROUP:
        share, solved = data.samples.zero_signal_late
    if math.isnan(share) and np.all(spread == 0):
        share = 1.0
    if not share >= ZERO_SIGNAL_NOTABLE:
        return []
    reward = trend(data, "reward_mean")
    if _is_near_greedy(data):
        return [Rated(Weight.SIGNAL, _same_answers(data, share), share + 1.0)]
    if _never_differed(data):
        return [Rated(Weight.SIGNAL, _nothing_to_learn(reward.late), share)]
    if solved >= SOLVED and reward.late >= reward.early:
        finding = Finding(
            "solved",
            "info",
            f"The task is nearly solved: in the last steps, all samples of a group got the same reward in "
            f"{percent(share)} of the groups, and in {percent(solved)} of these groups it was the best reward",
            advice="Stop the run, continue with harder prompts, or exclude such groups (filter_zero_signal: true)",
        )
        return [Rated(Weight.SIGNAL, finding, share)]
    is_bad = share >= ZERO_SIGNAL_BAD
    finding = Finding(
        "no_signal",
        "bad" if is_bad else "warning",
        f"In the last steps, {percent(share)} of the groups provide no learning signal: all samples of a "
        "group got the same "
        f"reward (mean {figure(reward.late)})",
        "The advantages of these groups are zero, so generating them and training on them is wasted work",
        "Use prompts that are sometimes solved (easier ones where the reward is low), a larger group_size, a higher "
        "sampling.temperature, or a reward with partial credit; filter_zero_signal: true excludes such groups",
        f"With filter_zero_signal, training uses only the {percent(1 - share)} of the groups that provide a "
        "learning signal",
    )
    return [Rated(Weight.SIGNAL, finding, share)]


def _is_near_greedy(data: RunData) -> bool:
    return float(data.setting("sampling.temperature", 1.0)) < NEAR_GREEDY


def _same_answers(data: RunData, share: float) -> Finding:
    temperature = float(data.setting("sampling.temperature", 1.0))
    return Finding(
        "no_signal",
        "bad",
        f"In the last steps, {percent(share)} of the groups provide no learning signal: "
        f"sampling.temperature is {temperature:g}, "
        "at which the samples of a group are nearly always the same answer",
        "Equal answers get equal rewards, so the advantages are zero and nothing is learned",
        "Set sampling.temperature to 1, or to a value not far below it",
    )


def _never_differed(data: RunData) -> bool:
    """Return whether all samples of all steps got the same reward."""
    spread, means = series(data.steps, "reward_std"), series(data.steps, "reward_mean")
    return bool(np.all(spread == 0) and np.all(means == means[0]))


def _is_best(data: RunData) -> bool:
    """Return whether the common reward is the best one, by convention 1."""
    return _never_differed(data) and number(data.steps[-1], "reward_mean") >= 1.0


def _nothing_to_learn(reward: float) -> Finding:
    """Equal rewards from the first step on: prompts cannot have been solved by learning."""
    if reward > 0:
        why = (
            "Either the model already solved every prompt before training, or the scorer gives every answer the same "
            "reward"
        )
    else:
        why = "Either no prompt is ever solved, or the scorer does not recognise a correct answer"
    return Finding(
        "no_signal",
        "bad",
        f"Nothing can be learned: every answer since the first step got the reward {figure(reward)}",
        f"{why}. All advantages are zero, so generating these answers and training on them is wasted work",
        "Read some answers with their rewards (areal-like samples), and test the scorer on correct and incorrect "
        "answers (areal-like probe does both before a run)",
    )


def _filtered(data: RunData) -> list[Rated]:
    """Groups without a signal that were left out."""
    counts = data.pulses[-1]["counts"] if data.pulses else {}
    filtered = number(data.summary, "groups_filtered", number(counts, "filtered", 0.0))
    drawn = number(data.summary, "groups_drawn", number(counts, "drawn", 0.0))
    if not drawn or filtered / drawn < FILTERED_NOTABLE:
        return []
    share = filtered / drawn
    finding = Finding(
        "groups_filtered",
        "warning",
        f"{percent(share)} of all groups were excluded, because all their samples got the same reward",
        "This is what filter_zero_signal does, but generating these groups was wasted work",
        "Use prompts that are sometimes solved, a larger group_size, or a higher sampling.temperature",
        f"The same generation work could produce up to {figure(1 / max(1 - share, 0.01))} times as many batches",
    )
    return [Rated(Weight.SIGNAL, finding, share)]


def _cut(data: RunData) -> list[Rated]:
    found = trend(data, "cut_share")
    if not found.late >= CUT_NOTABLE:
        return []
    limit = data.setting("sampling.max_new_tokens", "its limit")
    is_sound = is_learning(data)
    since = "" if found.early >= CUT_NOTABLE else f", up from {percent(found.early)} at first"
    if trend(data, "turns_max").late > 1:
        return [Rated(Weight.SIGNAL, _cut_episodes(found.late, since, is_sound=is_sound), found.late)]
    severity: Severity = "info" if is_sound else "bad" if found.late >= CUT_BAD else "warning"
    finding = Finding(
        "answers_cut",
        severity,
        f"{percent(found.late)} of the answers are truncated at sampling.max_new_tokens ({limit}){since}",
        "The reward still rises, so it probably does not depend on the end of an answer"
        if is_sound
        else "A truncated answer is incomplete and, with most rewards, gets no useful score",
        "Increase sampling.max_new_tokens (together with rollout.engine.max_context), or reward shorter answers. If "
        "the model never ends its answers, check its end-of-sequence token (sampling.stop_token_ids)",
    )
    return [Rated(Weight.SIGNAL, finding, found.late)]


def _cut_episodes(share: float, since: str, *, is_sound: bool) -> Finding:
    """Episodes of several turns. Those that fail usually go on until their last turn, so it is rarely the cause."""
    return Finding(
        "answers_cut",
        "info" if is_sound else "warning",
        f"{percent(share)} of the episodes were stopped by a limit before they had finished{since}",
        "The limits are the maximum number of turns, sampling.max_new_tokens and the context. An unsuccessful episode "
        "usually reaches the maximum number of turns",
        "Read some episodes (areal-like samples). If they end in the middle of a solution, increase "
        "rollout.workflow_options.max_turns, sampling.max_new_tokens or rollout.engine.max_context",
    )
