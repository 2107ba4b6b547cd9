"""Recorded runs of the controller's tests, for commands that pages show."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "controller" / "support"))
