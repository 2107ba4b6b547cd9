"""The summary of a run on the terminal: up to five sentences, answers before and after, all keys, next steps.

The numbers are in summary.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from areal_like.plain_text import one_line
from controller.run_folder.formatting import number, percent, span
from controller.telemetry.summary import OF_LAST_STRETCH, SINCE_RESUME

WHOLE_RUN = "the whole run"
_ENDS = {
    "completed": "The run is complete", "finished": "The run is complete", "exhausted": "The data is used up",
    "stopped": "The run was stopped", "failed": "The run failed",
}  # fmt: skip
NO_GAIN = 0.01
"""Minimum increase of the accuracy."""


def print_summary(summary: Mapping[str, Any], folder: Path, console: Console) -> None:
    """Print sentences, answers and keys, then the run's folder."""
    for line in sentences(summary):
        console.print(Text(line), soft_wrap=not console.is_terminal)
    console.print()
    if answers := summary.get("answers"):
        console.print(Text(f"Answers to the first {len(answers)} held-out prompts, before training and after:"))
        for line in _answer_lines(answers):
            shown = Text(line)
            shown.truncate(console.width, overflow="ellipsis")
            console.print(shown)
        console.print()
    for title, keys in _parts(summary).items():
        if title:
            console.print(Text(f"{title}:"))
        width = max(map(len, keys), default=0) + 2
        for key, value in keys.items():
            console.print(Text.assemble((key.ljust(width), "bold"), _row_words(key, value)), soft_wrap=True)
    console.print(Text(f"run folder: {folder}"), soft_wrap=True)


def next_steps(summary: Mapping[str, Any], folder: Path, config: Path) -> list[str]:
    """Commands for a run that has ended."""
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    lines = [f"show answers:      areal-like samples {folder}"]
    if before is not None and after is not None and after - before < NO_GAIN:
        lines.append(f"why no progress:   areal-like status {folder} --why, then areal-like probe {config}")
    return [*lines, f"export the model:  areal-like export {folder} MODEL_FOLDER"]


# ---------------------------------------------------------------- sentences


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """The summary in at most five lines; values that were not measured are left out."""
    if _is_evaluation(summary):
        lines = [_end({**summary, "steps": None}), _evaluated(summary), _time({**summary, "rollout_idle_share": None})]
    else:
        lines = [_end(summary), _accuracy(summary), _staleness(summary), _groups(summary), _time(summary)]
    return [one_line(line) for line in lines if line]


def _is_evaluation(summary: Mapping[str, Any]) -> bool:
    """Of `areal-like eval`: no step was wanted, and none was made."""
    return summary.get("num_steps") is None and summary.get("steps") == 0


def _evaluated(summary: Mapping[str, Any]) -> str:
    accuracy, num_rows = summary.get("accuracy_before"), summary.get("eval_prompts")
    on = f" on {num_rows:,} held-out prompts" if num_rows else ""
    return "No accuracy was measured." if accuracy is None else f"Accuracy{on} is {number(accuracy)}."


def _is_resumed(summary: Mapping[str, Any]) -> bool:
    return (summary.get("lives") or 1) > 1


def _over(summary: Mapping[str, Any]) -> str:
    return f"Over {WHOLE_RUN}, " if _is_resumed(summary) else ""


def _end(summary: Mapping[str, Any]) -> str:
    words = _ENDS.get(str(summary.get("status")), "The run has ended")
    steps, num_steps = summary.get("steps"), summary.get("num_steps")
    if steps is None or num_steps is None:
        return f"{words}."
    sessions = f" in {summary['lives']} sessions" if _is_resumed(summary) else ""
    early = f" ({summary['early_stop']})" if summary.get("early_stop") else ""
    return f"{words}: {steps:,} of {num_steps:,} steps{sessions}{early}."


def _accuracy(summary: Mapping[str, Any]) -> str:
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    version, num_rows = summary.get("accuracy_after_version"), summary.get("eval_prompts")
    on = f" on {num_rows:,} held-out prompts" if num_rows else ""
    last = f" after step {version}" if version else " at the end"
    if before is None and after is None:
        return "No accuracy was measured."
    if after is None:
        return f"Accuracy{on} was {number(before)} before the first step; it was not measured again."
    if before is None:
        return f"Accuracy{on} is {number(after)}{last}; it was not measured before the first step."
    return f"Accuracy{on} went from {number(before)} before the first step to {number(after)}{last}."


def _staleness(summary: Mapping[str, Any]) -> str:
    mean, most = summary.get("staleness_mean"), summary.get("staleness_max")
    if mean is None or most is None:
        return ""
    bound = summary.get("staleness_bound")
    limit = "there is no bound" if bound is None else f"the bound is {bound}"
    audit = summary.get("audit")
    found = "; a recount of the ledger confirms it" if audit == "clean" else f"; audit: {audit}" if audit else ""
    start = _over(summary)
    head = f"{start}{'s' if start else 'S'}amples were {mean:.2f} versions old on average when they were used"
    return f"{head}, {most} at most; {limit}{found}."


def _groups(summary: Mapping[str, Any]) -> str:
    keys = ("groups_drawn", "groups_consumed", "groups_filtered", "groups_dropped", "groups_in_flight")
    if not all(isinstance(summary.get(key), int) for key in keys):
        return ""
    drawn, consumed, filtered, dropped, unused = (summary[key] for key in keys)
    start = _over(summary)
    head = f"{start}{'o' if start else 'O'}f {drawn:,} prompts drawn, {consumed:,} were trained on"
    return f"{head}, {filtered:,} filtered, {dropped:,} dropped; {unused:,} have not been used yet."


def _time(summary: Mapping[str, Any]) -> str:
    wall_s = summary.get("wall_s")
    if wall_s is None:
        return ""
    head = f"{SINCE_RESUME.capitalize()}, it took" if _is_resumed(summary) else "It took"
    prepare_s, train_s, rate = summary.get("prepare_s"), summary.get("train_wall_s"), summary.get("samples_per_s")
    spent = [f"{span(prepare_s)} for the starting model"] if prepare_s and round(prepare_s) else []
    spent += [f"{span(train_s)} of training at {rate:,.0f} samples/s"] if train_s and rate else []
    waited, idle = summary.get("trainer_wait_share"), summary.get("rollout_idle_share")
    waits = [f"the trainer waited {percent(waited)} of its time"] if waited is not None else []
    waits += [f"rollout workers were idle {percent(idle)} of theirs"] if idle is not None else []
    start = _over(summary) if waits else ""
    parts = [f"{head} {span(wall_s)}{': ' if spent else ''}{', '.join(spent)}", start.lower() + ", ".join(waits)]
    return f"{'; '.join(filter(None, parts))}."


# ---------------------------------------------------------------- answers and keys


def _answer_lines(answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in answers:
        yield one_line(f"  prompt  {one['prompt']}")
        for when in ("before", "after"):
            value = one[f"value_{when}"]
            scored = "no score" if value is None else f"scored {value:g}"
            yield one_line(f"    {when:<6}  {scored:<8}  {one[when]}")


def _parts(summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The keys by the part of the run that they cover."""
    shown = {key: value for key, value in summary.items() if key != "answers"}
    if not _is_resumed(summary):
        return {"": shown}
    last = {key: value for key, value in shown.items() if key in OF_LAST_STRETCH}
    return {WHOLE_RUN: {key: value for key, value in shown.items() if key not in last}, SINCE_RESUME: last}


def _row_words(key: str, value: Any) -> str:
    """A value as text; accuracies always with three decimals, same as during the run."""
    if key.startswith("accuracy") and isinstance(value, float):
        return f"{value:.3f}"
    if key == "eval_metrics":
        return "; ".join(f"{when}: {_words(found)}" for when, found in value.items() if found)
    if key == "accuracy_by_version":
        return "  ".join(f"{version}: {number(accuracy)}" for version, accuracy in value.items()) or "-"
    return _length_words(value) if key == "lengths" else one_line(_words(value))


def _words(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return "  ".join(f"{key}: {_words(item)}" for key, item in value.items()) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _length_words(lengths: Mapping[str, Any]) -> str:
    """Tokens per answer: trained, drawn and, by cause, lost ones."""
    parts = {"trained": lengths["trained"], "drawn": lengths["drawn"], **lengths["lost"]}
    return "  ".join(
        f"{name}: mean {found['mean']:g}, p50 {found['p50']}, p99 {found['p99']} ({found['samples']} samples)"
        for name, found in parts.items()
    )
