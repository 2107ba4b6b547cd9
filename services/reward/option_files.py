"""Reads files that scorers' options name: a judge's rubric. Other requirements of scorers are in scorer_needs.py."""

from __future__ import annotations

from pathlib import Path

from areal_like.errors import UserError
from services.reward.scorer_options import fault_of_template


def read_rubric(path: str, where: str) -> str:
    """The rubric in a file. Raises UserError if it does not exist, is not text, or is not a template that includes the
    answer."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"rubric_file {path} cannot be read ({reason})", where=where) from error
    if fault := fault_of_template(text):
        raise UserError(f"rubric_file {path} {fault}", where=where)
    return text
