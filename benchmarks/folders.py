"""Folders that benchmarks read and write."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
"""Published results."""
