"""Checks of memory, swap, shared memory, and weight stores left by killed runs.

Nothing is removed; a run removes such stores when it starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from controller.doctor import cgroups
from controller.doctor.finding import NOT_HERE, Check, Finding, absent, count, ok, problem, size, warning
from controller.doctor.machine import Machine

TOPIC = "Memory"
SHARED_MEMORY = Path("/dev/shm")
QUICKSTART_BYTES = 1_300_000_000
"""Peak of all processes of the quickstart together: 1.2 GB (benchmarks/results/soak.json), plus a margin."""
STORE_BYTES = 256 << 20
"""With less free space, a run transfers weights through its folder instead (areal_like.weights.default_root)."""
KEPT_VERSIONS = 4
"""Versions in shared memory at once: trainer.weights.keep (3), and one being written."""


def memory(machine: Machine) -> Finding:
    """Check the free memory of the machine and of the control group."""
    whole, limit = machine.memory(), cgroups.memory(machine)
    free = whole.available if limit is None else min(whole.available, limit[1])
    words = f"{size(free)} free of {size(whole.total)}"
    words += f" (control group: {size(limit[1])} free of {size(limit[0])})" if limit else ""
    data = {"total_bytes": whole.total, "free_bytes": free, "limit_bytes": limit and limit[0]}
    need = f"the quickstart needs {size(QUICKSTART_BYTES)}"
    if free < QUICKSTART_BYTES:
        return problem(words, f"{need}: close other programs, or raise the container's limit", **data)
    if free < 2 * QUICKSTART_BYTES:
        return warning(words, f"{need}, which leaves little free memory: close other programs", **data)
    return ok(words, **data)


def swap(machine: Machine) -> Finding:
    """Check whether memory is already short."""
    found = machine.swap()
    if not found.total:
        return ok("none (a run that exceeds the memory is killed, not slowed down)", total_bytes=0)
    words = f"{size(found.used)} used of {size(found.total)}"
    data = {"total_bytes": found.total, "used_bytes": found.used}
    if found.used > 0.25 * found.total and found.used > QUICKSTART_BYTES:
        return warning(
            words,
            "this machine is low on memory, or was earlier; processes that are swapped out slow the run down",
            **data,
        )
    return ok(words, **data)


def shared_memory(machine: Machine) -> Finding:
    """Check shared memory, through which weights are transferred, and the size of the largest model that fits."""
    if not machine.is_linux:
        return absent(f"no {SHARED_MEMORY} on this system; weights are transferred through the run folder")
    try:
        free, total = machine.free_bytes(SHARED_MEMORY), machine.total_bytes(SHARED_MEMORY)
    except OSError as error:
        return warning(
            f"{SHARED_MEMORY}: {error.strerror}",
            f"weights are transferred through the run folder instead; to fix this, mount a tmpfs at {SHARED_MEMORY}",
        )
    words = f"{size(free)} free of {size(total)} at {SHARED_MEMORY}"
    data = {"free_bytes": free, "total_bytes": total}
    how = "docker run --shm-size=16g, or mount -o remount,size=16g /dev/shm"
    if not os.access(SHARED_MEMORY, os.W_OK):
        return warning(
            f"{SHARED_MEMORY} is not writable",
            "weights are transferred through the run folder; to fix this: chmod 1777 /dev/shm",
        )
    if free < STORE_BYTES:
        return warning(
            words,
            f"a run needs {size(STORE_BYTES)}, so its weights are transferred through the run folder; to fix this: "
            f"{how}",
            **data,
        )
    billions = free / (2 * KEPT_VERSIONS) / 1e9
    advice = f"larger models: {how}" if billions < 1 else ""
    return Finding(
        "ok",
        f"{words}, which is enough for {KEPT_VERSIONS} versions of a model with {billions:.2g} billion parameters in "
        "bf16",
        advice,
        data,
    )


def leftovers(machine: Machine) -> Finding:
    """Check for weight stores in shared memory whose run has exited."""
    from areal_like.store_owner import dead_stores  # imports psutil and pydantic, which the doctor reports on

    if not machine.is_linux:
        return NOT_HERE
    dead = [(path, sum(_bytes_below(path))) for path in dead_stores(SHARED_MEMORY)]
    if not dead:
        return ok("no weights in shared memory were left behind by crashed runs")
    total = sum(num_bytes for _, num_bytes in dead)
    names = ", ".join(path.name for path, _ in dead[:3]) + (", ..." if len(dead) > 3 else "")
    paths = " ".join(f"{SHARED_MEMORY}/{path.name}" for path, _ in dead)
    return warning(
        f"crashed runs left {count(len(dead), 'weight store')} behind ({size(total)}): {names}",
        f"the next run removes these files; to remove them now: rm -r {paths}",
        stores=[str(path) for path, _ in dead], num_bytes=total,
    )  # fmt: skip


def _bytes_below(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            yield path.lstat().st_size
        except OSError:
            continue  # removed meanwhile


CHECKS = (
    Check(TOPIC, "memory", memory, is_needed=True),
    Check(TOPIC, "swap", swap),
    Check(TOPIC, "shared memory", shared_memory),
    Check(TOPIC, "leftovers", leftovers),
)
