"""Default options of `areal-like data labels`; a module of its own, because comparing answers imports slow packages."""

from __future__ import annotations

MIN_ANSWERS = 4
"""Final answers of a row that is judged."""
MIN_AGREEMENT = 0.6
"""Share of them that must agree with one another."""
MOST = 32
"""Newest answers of a row that are taken."""
