"""A machine made up for the doctor's tests: files, programs, versions, limits and probes' answers as given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from controller.doctor.machine import Answer, Machine, Mount, Ran

GB = 1_000_000_000

CPU_TORCH: Mapping[str, Any] = {
    "version": "2.13.0+cpu", "cuda": "", "hip": "", "num_threads": 2, "instructions": "AVX512", "has_varlen": True,
    "has_mps": False, "computes": True, "import_s": 1.5,
}  # fmt: skip
CUDA_TORCH: Mapping[str, Any] = {**CPU_TORCH, "version": "2.13.0", "cuda": "13.0"}


def gpu(**changes: Any) -> dict[str, Any]:
    """One healthy device as the probe describes it."""
    return {
        "name": "NVIDIA H200", "total_bytes": 140 * GB, "free_bytes": 139 * GB, "capability": [9, 0], "fault": "",
        **changes,
    }  # fmt: skip


def gpus(*devices: Mapping[str, Any], fault: str = "", apart: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
    """What the probe of devices answers; pairs in `apart` do not reach each other."""
    indices = range(len(devices))
    peers = [[(a, b) not in apart and (b, a) not in apart for b in indices] for a in indices]
    return {"fault": fault, "devices": list(devices), "peers": peers}


class FakeMachine(Machine):
    """Anything not given is absent."""

    def __init__(
        self,
        *,
        system: str = "linux",
        files: Mapping[str, str] | None = None,
        folders: Mapping[str, Sequence[str]] | None = None,
        programs: Mapping[str, str] | None = None,
        says: Callable[[Sequence[str]], Ran] | None = None,
        versions: Mapping[str, str] | None = None,
        answers: Mapping[str, Mapping[str, Any] | str] | None = None,
        limits: Mapping[str, tuple[float, float]] | None = None,
        environment: Mapping[str, str] | None = None,
        cores: tuple[int, int | None] = (8, 8),
        load: float = 0.1,
        memory: tuple[float, float] = (32 * GB, 30 * GB),
        swap: tuple[float, float] = (0, 0),
        disk: tuple[float, float] = (500 * GB, 400 * GB),
        mounts: Sequence[Mount] = (Mount("/", "ext4"),),
        own_threads: int = 0,
        runs_dir: Path = Path("runs"),
    ) -> None:
        super().__init__(runs_dir)
        self.system, self.environment = system, environment or {}
        self._files, self._folders, self._programs = files or {}, folders or {}, programs or {}
        self._says, self._versions, self._fake_answers = says, versions or {}, answers or {}
        self._limits, self._cores, self._load = limits or {}, cores, load
        self._memory, self._swap, self._disk, self._mounts = memory, swap, disk, mounts
        self._own_threads = own_threads
        self.probed: list[str] = []

    def text(self, path: str) -> str:
        return self._files.get(path, "")

    def names(self, folder: str) -> list[str]:
        return sorted(self._folders.get(folder, ()))

    def which(self, program: str) -> str:
        return self._programs.get(program, "")

    def version(self, package: str) -> str:
        return self._versions.get(package, "")

    def package_folder(self, package: str) -> str:
        return f"/site/{package}" if package in self._versions else ""

    def free_bytes(self, folder: Path) -> int:
        return int(self._disk[1])

    def total_bytes(self, folder: Path) -> int:
        return int(self._disk[0])

    def limit(self, name: str) -> tuple[float, float]:
        return self._limits.get(name, (math.inf, math.inf))

    def num_own_threads(self) -> int:
        return self._own_threads

    def mounts(self) -> list[Mount]:
        return list(self._mounts)

    def memory(self) -> Any:
        return SimpleNamespace(total=int(self._memory[0]), available=int(self._memory[1]))

    def swap(self) -> Any:
        return SimpleNamespace(total=int(self._swap[0]), used=int(self._swap[1]))

    def num_cores(self) -> tuple[int, int | None]:
        return self._cores

    def load(self) -> float:
        return self._load

    def run(
        self, argv: Sequence[str], *, deadline_s: float, environment: Mapping[str, str] | None = None, stdin: str = "",
        is_guarded: bool = True,
    ) -> Ran:  # fmt: skip
        return self._says(argv) if self._says else Ran(None, fault="cannot be started (No such file or directory)")

    def probe(self, name: str, *arguments: str, deadline_s: float = 30.0, python: str = "") -> Answer:
        """The given data; a string is a fault."""
        self.probed.append(name)
        given = self._fake_answers.get(name, "printed nothing")
        return Answer({}, given) if isinstance(given, str) else Answer(given)
