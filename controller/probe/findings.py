"""Determines why a reward would stay flat, from the samples and measurements of a probe.

Sampling is in probe.py, layout in page.py.

A cause hides symptoms: if tokenizer, prompt, end of sequence or reward are wrong, prompts that are too hard are not
reported. A new cause is a function here and an entry in CAUSES or SYMPTOMS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from controller.probe.finding import Finding, Seen

CUT_LIMIT = 0.5
"""Share of answers cut at the length limit above which the limit determines the reward."""
MEAN_NATS, MEAN_NATS_HALF = 0.01, 0.1
"""Mean difference of log-probs that cannot be explained by float32, or by 16-bit, arithmetic."""
LOW_TEMPERATURE = 0.3
OTHER_COLUMN_SHARE = 0.25
"""Minimum share of samples that end with the content of another column."""
_MISSING = re.compile(r"has no `|KeyError|no gold|no column")


def find(seen: Seen) -> list[Finding]:
    """The causes, most basic first; symptoms only if no cause explains them. Empty for a working configuration."""
    causes = [found for look in CAUSES if (found := look(seen))]
    if any(cause.kind != "logprobs" for cause in causes):
        return causes
    symptom = next((found for look in SYMPTOMS if (found := look(seen))), None)
    return causes + ([symptom] if symptom else [])


def _tokenizer(seen: Seen) -> Finding | None:
    sampled, remedy = seen.sampled, "use the tokenizer of this model: set model.tokenizer: from_model"
    if sampled.outside_model:
        what = f"prompts contain tokens beyond the model's vocabulary of {sampled.vocab_size}"
    elif sampled.outside_tokenizer and not seen.is_untrained:
        what = f"the model generates tokens beyond the tokenizer's vocabulary of {sampled.tokenizer_size}"
    elif sampled.are_stops_ordinary:
        what = (
            f"the model's end-of-sequence token is {' '.join(sampled.stop_tokens)}, which is an ordinary token of the "
            "tokenizer"
        )
    elif any("no token for" in reason for reason in sampled.rejected.values()) and not sampled.answers:
        return Finding("tokenizer", f"The tokenizer cannot encode any prompt: {_first(seen)}.", remedy)
    else:
        return None
    return Finding("tokenizer", f"The tokenizer does not match the model: {what}.", remedy)


def _template(seen: Seen) -> Finding | None:
    if seen.sampled.unknown_marks:
        marks = " ".join(seen.sampled.unknown_marks)
        what = (
            f"The prompt contains {marks}, for which the tokenizer has no token, so the template belongs to a "
            "different model."
        )
        return Finding(
            "template", what, "correct rollout.prompt_template, or remove this setting to use the chat template"
        )
    if seen.prompt_template is not None and seen.sampled.has_chat_template and seen.cut_share == 1.0:
        what = "rollout.prompt_template replaces the model's chat template, and every answer reaches the length limit."
        return Finding(
            "template", what, "remove rollout.prompt_template, or add the chat template's special tokens to it"
        )
    return None


def _prompts(seen: Seen) -> Finding | None:
    if not seen.sampled.rejected or seen.sampled.answers:
        return None
    return Finding(
        "prompts",
        f"No row can be converted to a prompt: {_first(seen)}.",
        "check data.train.columns and rollout.engine.max_context",
    )


def _end_of_sequence(seen: Seen) -> Finding | None:
    if seen.sampling.ignore_eos:
        what = "No token ends an answer, because sampling.forced_lengths is set, which is only for benchmarks."
        return Finding("end_of_sequence", what, "remove sampling.forced_lengths")
    if not seen.sampled.stop_tokens:
        what = (
            "No token ends an answer, because neither generation_config.json nor the tokenizer defines an "
            "end-of-sequence token."
        )
        return Finding("end_of_sequence", what, "set eos_token_id in the model's generation_config.json")
    passed = {} if seen.is_untrained else seen.sampled.passed_over
    if seen.answers and sum(passed.values()) >= len(seen.answers) / 2:
        token = max(passed, key=lambda name: passed[name])
        what = f"Answers continue after {token}; only {' '.join(seen.sampled.stop_tokens)} ends them."
        return Finding(
            "end_of_sequence", what, f"add the id of {token} to eos_token_id in the model's generation_config.json"
        )
    return None


def _scorer(seen: Seen) -> Finding | None:
    failed = [one for one in seen.verdicts if one.kind != "scored"]
    if not failed or len(failed) < len(seen.verdicts) / 2:
        return None
    is_column = _MISSING.search(failed[0].reason) is not None
    what = f"{len(failed)} of {len(seen.verdicts)} answers got no verdict: {failed[0].reason}."
    remedy = "set the column that the scorer reads in data.train.columns or in the scorer's options"
    return Finding("reward_column" if is_column else "scorer", what, remedy if is_column else "correct the scorer")


def _reward(seen: Seen) -> Finding | None:
    golds = seen.gold_values
    if not golds.get("answer") or any(value > 0 for value in seen.values):
        return None
    if max(golds["answer"]) > 0:
        return _other_column(seen)
    if seen.values and seen.signal_share:  # rewards below 0 differ as well
        return None
    for column, values in golds.items():
        if column != "answer" and values and min(values) > 0:
            what = f"The reward is 0 for the gold answers in `answer`, but not for the values of the column `{column}`."
            remedy = f"set data.train.columns.answer: {column}, or make the scorer read row['answer']"
            return Finding("reward_column", what, remedy)
    what = "The reward is 0 for every sample, and also for the gold answers in all usual formats."
    return Finding(
        "reward_zero", what, "test the scorer on a single row, and check where it looks for the final answer"
    )


def _other_column(seen: Seen) -> Finding | None:
    """The scorer works and no sample is correct, but many end with the content of another column of their row."""
    for column in {name: None for row in seen.rows for name in row if name not in ("answer", "prompt", "messages")}:
        hits = [_ends_with(one.text, seen.rows[one.row], column) for one in seen.answers]
        if sum(hits) >= OTHER_COLUMN_SHARE * len(hits) > 0:
            share = f"{sum(hits)} of {len(hits)}"
            what = f"No sample has the row's `answer`, but {share} samples end with the value of the column `{column}`."
            return Finding("reward_column", what, f"set data.train.columns.answer: {column}")
    return None


def _ends_with(text: str, row: Mapping[str, Any], column: str) -> bool:
    """Return whether the text ends with the content of the column, where a final answer is expected."""
    wanted = str(row.get(column, "")).strip()
    return bool(wanted) and re.search(rf"(?<!\w){re.escape(wanted)}$", text.rstrip(" .\n}$)")) is not None


def _greedy(seen: Seen) -> Finding | None:
    if not seen.are_groups_identical:
        return None
    what = "All samples of each prompt are identical, so no group provides a learning signal"
    if seen.sampling.temperature < LOW_TEMPERATURE:
        return Finding(
            "greedy", f"{what}: sampling.temperature is {seen.sampling.temperature:g}.", "set sampling.temperature: 1.0"
        )
    return Finding(
        "greedy",
        f"{what}: the policy is already deterministic.",
        "start from a model whose answers to a prompt vary more",
    )


def _logprobs(seen: Seen) -> Finding | None:
    difference = seen.logprob_difference
    if difference is None or difference[0] <= (MEAN_NATS_HALF if seen.is_half else MEAN_NATS):
        return None
    mean, largest = difference
    what = f"Log-probs of engine and trainer differ by {mean:.2g} nat on average (at most {largest:.2g})."
    return Finding(
        "logprobs",
        what,
        "use the same weights and the same dtype in the engine and in the trainer: see "
        "rollout.engine.dtype and model.dtype",
    )


def _length(seen: Seen) -> Finding | None:
    if seen.is_untrained or (seen.cut_share or 0.0) < CUT_LIMIT:
        return None
    what = f"{seen.cut_share:.0%} of the answers are truncated at the limit of {seen.sampling.max_new_tokens} tokens."
    return Finding("length", what, "increase sampling.max_new_tokens and rollout.engine.max_context")


def _too_hard(seen: Seen) -> Finding | None:
    if seen.warm_start_follows or not seen.values or any(value > 0 for value in seen.values) or seen.signal_share:
        return None
    if seen.is_untrained:
        what = f"None of {len(seen.values)} samples gets a reward: the model has random weights."
        return Finding("too_hard", what, "start from a trained model (model.path), or use a warm start (warm_start)")
    what = f"None of {len(seen.values)} samples gets a reward, although the scorer works: the prompts are too hard."
    return Finding("too_hard", what, "use easier prompts, a larger group_size, or a warm start (warm_start)")


def _equal_groups(seen: Seen) -> Finding | None:
    if seen.warm_start_follows or seen.signal_share != 0.0:
        return None
    what = "In every group all rewards are equal, so every advantage is zero"
    if len(set(seen.values)) == 1:
        return Finding(
            "equal_groups", f"{what}: the reward of each sample is {seen.values[0]:g}.",
            "use harder prompts, or a scorer that distinguishes between answers",
        )  # fmt: skip
    return Finding("equal_groups", f"{what}.", "use prompts of medium difficulty, or a larger group_size")


def _first(seen: Seen) -> str:
    return next(iter(seen.sampled.rejected.values()))


Look = Callable[[Seen], Finding | None]
CAUSES: tuple[Look, ...] = (
    _tokenizer, _template, _prompts, _end_of_sequence, _scorer, _reward, _logprobs,
)  # fmt: skip
SYMPTOMS: tuple[Look, ...] = (_greedy, _length, _too_hard, _equal_groups)
