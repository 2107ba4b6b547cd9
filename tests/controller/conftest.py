"""Lets the tests of this folder import its models (ledger_model, virtual_cluster)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
