"""Remedies for failed programs, selected by their error message."""

from __future__ import annotations

import re
from collections.abc import Sequence

KNOWN: Sequence[tuple[str, str]] = (
    (r"torchvision", "the torchvision here was built for another torch: pip uninstall torchvision, it is not needed"),
    (r"No usable temporary directory", "make /tmp writable, or set TMPDIR to a writable folder"),
    (r"No space left|Errno 28", "make room on the disk, in /tmp and in /dev/shm"),
    (r"no result within", "it hangs, or the machine is overloaded: try again when it is idle"),
    (r"SIGILL", "this processor lacks instructions that the build uses: install a build for it"),
    (r"SIGKILL|MemoryError|Cannot allocate memory", "memory ran out: close other programs, or raise the limit"),
    (r"lib(cu|nv|nccl|amd|hip|roc)\w*\.so", "a GPU library is missing or hidden by another: unset LD_LIBRARY_PATH"),
    (r"GLIBC|GLIBCXX", "this system is too old for the build: use a newer one, or a container"),
    (r"numpy|NumPy", "numpy is incompatible: pip install -r requirements.lock"),
)  # fmt: skip


def remedy(fault: str, otherwise: str) -> str:
    """The remedy for an error message, or `otherwise`."""
    return next((advice for pattern, advice in KNOWN if re.search(pattern, fault)), otherwise)
