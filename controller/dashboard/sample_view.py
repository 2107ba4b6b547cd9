"""Samples by prompt as shown on the page: fields of groups and answers, with limits on text.

Reading is in runs/sample_groups.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from areal_like.plain_text import printable
from controller.report.overview import text
from controller.run_folder.formatting import number
from controller.runs.sample_groups import GroupReader, GroupRow
from controller.runs.sample_page import MAX_CHARS
from controller.runs.sample_rows import Sample
from controller.runs.sample_text import trajectory_title

Span = list[str]
"""Policy versions that sampled it (empty: given text, or not known), and the text."""


def groups_content(reader: GroupReader, step: int | None) -> dict[str, Any]:
    """List of groups. Raises UserError."""
    return {"groups": [_group(row) for row in reader.groups(step)]}


def answers_content(reader: GroupReader, group_id: int) -> dict[str, Any]:
    """All answers of one prompt. Raises UserError."""
    samples = reader.answers(group_id)
    return {
        "group": group_id,
        "prompt": cut(next((sample.prompt for sample in samples if sample.prompt), "")),
        "answers": [_answer(sample) for sample in samples],
        "problems": [text(problem) for problem in reader.problems],
    }


def cut(given: str) -> str:
    """Make text printable; the middle of a long text is left out."""
    if len(given) <= MAX_CHARS:
        return printable(given)
    half = MAX_CHARS // 2
    left_out = len(given) - 2 * half
    return printable(f"{given[:half]}\n[... {left_out:,} characters more: areal-like samples --full]\n{given[-half:]}")


def _group(row: GroupRow) -> dict[str, Any]:
    return {**msgspec.to_builtins(row), "fate": text(row.fate, 30)}


def _answer(sample: Sample) -> dict[str, Any]:
    return {
        "name": sample.name,
        "reward": number(sample.reward),
        "components": [[text(name, 60), f"{value:g}"] for name, value in sample.components.items()],
        "facts": [
            f"version {sample.versions}", f"{sample.num_tokens:,} tokens", text(sample.finish_reason or "-", 30),
            *([f"stale by {sample.staleness}"] if sample.staleness is not None else []), text(sample.worker, 60),
        ],
        "remarks": [text(remark) for remark in sample.remarks()],
        "parts": _parts(sample),
    }  # fmt: skip


def _parts(sample: Sample) -> list[dict[str, Any]]:
    """The answer split where the version changes; for an episode each trajectory with sampled and given text."""
    if sample.trajectories:
        several = len(sample.trajectories) > 1
        return [
            {"title": trajectory_title(place, len(sample.trajectories), one) if several else "",
             "spans": [[span.versions, cut(span.shown)] for span in one.spans]}
            for place, one in enumerate(sample.trajectories, 1)
        ]  # fmt: skip
    if sample.pieces and len(sample.answer) <= MAX_CHARS:
        return [{"title": "", "spans": [[str(version), printable(part)] for version, part in sample.pieces]}]
    version = sample.versions if sample.first_version == sample.last_version else ""
    return [{"title": "", "spans": [[version, cut(sample.answer)]]}]
