"""Makes the helpers beside these tests importable (`--import-mode=importlib` does not)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
