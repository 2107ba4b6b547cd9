"""Makes the toys importable by the path that a configuration names them by."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
