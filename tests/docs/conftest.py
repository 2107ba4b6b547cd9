"""The commands that pages show, and the recorded runs of the controller's tests, with which they are run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "controller" / "support"))
