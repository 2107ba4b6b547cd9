"""Makes what was written survive a power loss."""

from __future__ import annotations

import os
from pathlib import Path


def flush_to_disk(path: Path) -> None:
    """Fsync a file, or the names in a folder. A file that is renamed without it may be empty after a power loss, and a
    new one whose folder was not flushed may be missing. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
