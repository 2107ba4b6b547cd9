"""Limits of this process's control group, set by a container or a batch system.

Reads the files of version 1 and 2. A limit may be set on any ancestor, so all of them are read. In a container the
group's folder may not be mounted; then the container's own is at the top of the mount.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from controller.doctor.machine import Machine

ROOT = "/sys/fs/cgroup"
NO_LIMIT = 1 << 60
"""Version 1 writes a huge number if there is no limit."""


def _folders(machine: Machine, controller: str) -> Iterator[str]:
    """Folders whose settings apply to this process, version 2 and then version 1."""
    for line in machine.text("/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            bases = [ROOT, f"{ROOT}/unified"]
        elif controller in names.split(","):
            bases = [f"{ROOT}/{controller}", f"{ROOT}/{names}"]
        else:
            continue
        own = PurePosixPath("/") / path.lstrip("/")
        for base in dict.fromkeys(bases):
            for folder in (own, *own.parents):
                yield base + ("" if str(folder) == "/" else str(folder))


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) < NO_LIMIT else None


def cores(machine: Machine) -> float | None:
    """Cores allowed by the tightest quota; None without a quota."""
    quotas = []
    for folder in _folders(machine, "cpu"):
        words = machine.text(f"{folder}/cpu.max").split()
        if len(words) == 2 and words[0].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _number(machine.text(f"{folder}/cpu.cfs_quota_us")), machine.text(f"{folder}/cpu.cfs_period_us")
        if quota and period.isdigit():
            quotas.append(quota / int(period))
    return min(quotas, default=None)


def memory(machine: Machine) -> tuple[int, int] | None:
    """(limit, free) in bytes of the group with the least free memory; None without a limit. Cached files count as
    free.
    """
    found = []
    for folder in _folders(machine, "memory"):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(machine.text(f"{folder}/{limit_name}"))
            if limit is None:
                continue
            used = _number(machine.text(f"{folder}/{used_name}")) or 0
            table = dict(
                line.split() for line in machine.text(f"{folder}/memory.stat").splitlines() if line.count(" ") == 1
            )
            cached = _number(table.get(cache_name, "")) or 0
            found.append((limit, max(0, limit - max(0, used - cached))))
    return min(found, key=lambda pair: pair[1], default=None)


def processes(machine: Machine) -> tuple[int, int] | None:
    """(limit, used) of processes and threads of the group with the fewest left; None without a limit."""
    found = []
    for folder in _folders(machine, "pids"):
        limit = _number(machine.text(f"{folder}/pids.max"))
        if limit is not None:
            found.append((limit, _number(machine.text(f"{folder}/pids.current")) or 0))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)
