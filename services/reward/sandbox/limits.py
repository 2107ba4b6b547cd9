"""Resource limits of one program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Bounds of one program. All are per program, `time_s` per run of it."""

    time_s: float = 3.0
    """Own seconds: on processors, of the whole process tree, and those in which all of it only waited (run.py)."""
    memory_bytes: int = 1 << 30
    """Resident memory of the whole tree; also the address space of each process, with some room for stacks."""
    max_tasks: int = 32
    """Number of processes and threads at one time."""
    max_file_bytes: int = 16 << 20
    max_open_files: int = 64
    tmp_bytes: int = 32 << 20
    """Size of the private folder for temporary files."""
    max_output_bytes: int = 4 << 20
    """Largest output of a program, and largest answer to one request of the tests."""

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Limits:
        """The inverse of `as_dict`."""
        return Limits(**fields)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers by name."""
        return asdict(self)
