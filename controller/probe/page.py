"""Output of a probe: text for users, JSON for programs.

Conclusions are in findings.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from areal_like.plain_text import printable
from areal_like.probe_files import ProbeAnswer
from controller.probe.finding import Finding, Seen

NUM_SHOWN = 5
MAX_CHARS = 300


def as_json(name: str, seen: Seen, findings: Sequence[Finding], notes: Sequence[str]) -> str:
    """One JSON object. Shares are null if they were not measured."""
    difference = seen.logprob_difference
    page = {
        "name": name,
        "num_prompts": len(seen.rows),
        "num_samples": len(seen.answers),
        "pass_rate": seen.pass_rate,
        "mean_reward": _mean(seen.values),
        "signal_share": seen.signal_share,
        "cut_share": seen.cut_share,
        "gold_reward": _mean(seen.gold_values.get("answer", [])),
        "stop_tokens": seen.sampled.stop_tokens,
        "has_chat_template": seen.sampled.has_chat_template,
        "logprob_difference": None if difference is None else {"mean": difference[0], "max": difference[1]},
        "findings": [{"kind": one.kind, "sentence": one.sentence, "remedy": one.remedy} for one in findings],
        "notes": list(notes),
        "prompt": seen.sampled.prompts[0] if seen.sampled.prompts else None,
        "samples": [
            {"row": one.row, "text": one.text, "num_tokens": len(one.tokens_R), "is_cut": one.is_cut, "reward": reward}
            for one, reward in _shown(seen)
        ],
    }
    return json.dumps(page, ensure_ascii=False, indent=2) + "\n"


def as_text(name: str, seen: Seen, findings: Sequence[Finding], notes: Sequence[str]) -> str:
    """Lines for a terminal: numbers, samples to read, then the causes in sentences."""
    num_groups = len({one.row for one in seen.answers})
    lines = [f"probe of {name}: {num_groups} prompts, {len(seen.answers)} samples of the starting model"]
    for label, text in (
        ("pass rate", _share(seen.pass_rate)),
        ("mean reward", _number(_mean(seen.values))),
        ("groups with signal", _share(seen.signal_share)),
        ("truncated at the length limit", _share(seen.cut_share)),
        ("reward of gold answers", _number(_mean(seen.gold_values.get("answer", [])))),
        ("chat template", "yes" if seen.sampled.has_chat_template else "none"),
        ("ends an answer", " ".join(seen.sampled.stop_tokens) or "nothing"),
        ("engine and trainer differ by", _difference(seen)),
    ):
        lines.append(f"  {label:<29} {text}")
    if seen.sampled.prompts:
        lines += ["", f"first prompt: {_text(seen.sampled.prompts[0])}"]
    for one, reward in _shown(seen):
        end = "truncated" if one.is_cut else "complete"
        lines.append(f"  row {one.row}  reward {_number(reward)}  {len(one.tokens_R)} tokens, {end}: {_text(one.text)}")
    lines.append("")
    for finding in findings:
        lines += [f"{finding.kind}: {finding.sentence}", f"  -> {finding.remedy}"]
    if not findings:
        lines.append("no reason was found why the reward would stay flat")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)]) + "\n"


def _shown(seen: Seen) -> list[tuple[ProbeAnswer, float | None]]:
    """Up to five samples of different prompts, with their rewards."""
    rewards = [one.value for one in seen.verdicts] or [None] * len(seen.answers)
    pairs = list(zip(seen.answers, rewards, strict=True))
    first: dict[int, tuple[ProbeAnswer, float | None]] = {}
    for pair in pairs:
        first.setdefault(pair[0].row, pair)
    others = [pair for pair in pairs if first[pair[0].row] is not pair]
    return [*first.values(), *others][:NUM_SHOWN]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _difference(seen: Seen) -> str:
    found = seen.logprob_difference
    return "not measured" if found is None else f"{found[0]:.1e} nat on average, {found[1]:.1e} at most"


def _text(text: str) -> str:
    short = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
    return json.dumps(printable(short), ensure_ascii=False)
