"""Errors that reading the files of a damaged run may raise."""

from __future__ import annotations

import sqlite3

from areal_like.errors import OperationError

DAMAGED = (
    sqlite3.Error, OperationError, ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError,
    RecursionError, MemoryError, OSError,
)  # fmt: skip
"""UserError is a ValueError."""
