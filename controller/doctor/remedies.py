"""Remedies for failed programs, selected by their error message."""

from __future__ import annotations

import re
from collections.abc import Sequence

KNOWN: Sequence[tuple[str, str]] = (
    (r"torchvision", "the installed torchvision was built for a different torch: pip uninstall torchvision"),
    (r"No usable temporary directory", "make /tmp writable, or set TMPDIR to a writable folder"),
    (r"No space left|Errno 28", "free some space on the disk, in /tmp and in /dev/shm"),
    (r"no result within", "a program hangs, or the machine is overloaded: try again when the machine is idle"),
    (r"SIGILL", "this processor lacks instructions that the build uses: install a build for this processor"),
    (r"SIGKILL|MemoryError|Cannot allocate memory", "memory ran out: close other programs, or raise the limit"),
    (r"lib(cu|nv|nccl|amd|hip|roc)\w*\.so", "a GPU library is missing or has the wrong version: unset LD_LIBRARY_PATH"),
    (r"GLIBC|GLIBCXX", "this system is too old for the build: use a newer system, or a container"),
    (r"numpy|NumPy", "numpy is incompatible: pip install -r requirements.lock"),
)  # fmt: skip


def remedy(fault: str, otherwise: str) -> str:
    """The remedy for an error message, or `otherwise`."""
    return next((advice for pattern, advice in KNOWN if re.search(pattern, fault)), otherwise)
