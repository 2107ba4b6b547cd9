"""Checks of cores, their load, and settings of thread libraries."""

from __future__ import annotations

import math

from controller.doctor import cgroups
from controller.doctor.finding import Check, Finding, count, ok, warning
from controller.doctor.machine import Machine

TOPIC = "Processor"
QUICKSTART_CORES = 2
BUSY_SHARE = 0.5
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
BINDINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
FREE = ("", "false", "none", "disabled")


def usable_cores(machine: Machine) -> float:
    """Cores this process may use: the minimum of the machine's cores, its affinity and its control group's quota."""
    logical, affinity = machine.num_cores()
    quota = cgroups.cores(machine)
    return min(logical, affinity or logical, math.inf if quota is None else quota)


def cores(machine: Machine) -> Finding:
    """Check the number of cores, and of usable cores."""
    logical, affinity = machine.num_cores()
    quota, usable = cgroups.cores(machine), usable_cores(machine)
    models = [
        line.split(":", 1)[1].strip() for line in machine.text("/proc/cpuinfo").splitlines() if "model name" in line
    ]
    limits = [
        *([f"affinity {affinity}"] if affinity is not None and affinity != logical else []),
        *([f"control group {quota:g}"] if quota is not None else []),
    ]
    words = f"{usable:g} of {logical} usable" + (f" ({', '.join(limits)})" if limits else "")
    words += f", {models[0]}" if models else ""
    data = {"logical": logical, "affinity": affinity, "quota": quota, "usable": usable}
    if usable < QUICKSTART_CORES:
        what = "provide two cores" + (
            " (docker run --cpus, taskset, or the batch system sets this limit)" if limits else ""
        )
        return warning(words, f"rollout and training have to share one core: {what}", **data)
    return ok(words, **data)


def load(machine: Machine) -> Finding:
    """Check whether other programs use the cores now."""
    value, usable = machine.load(), usable_cores(machine)
    words = f"{value:.2f} on average in the last minute, of {count(math.floor(usable), 'core')}"
    if value > BUSY_SHARE * usable:
        return warning(words, "other programs are using the cores, so a run will be slower", load=value)
    return ok(words, load=value)


def threads(machine: Machine) -> Finding:
    """Check settings of OpenMP and similar libraries. Each process of a run gets its own thread count, but bindings are
    inherited.
    """
    environment = machine.environment
    bound = [f"{name}={environment[name]}" for name in BINDINGS if environment.get(name, "").lower() not in FREE]
    if bound:
        return warning(
            ", ".join(bound),
            "these variables bind all processes of a run to the same cores; unset "
            f"{' and '.join(setting.partition('=')[0] for setting in bound)}",
        )
    if environment.get("OMP_WAIT_POLICY", "").lower() == "active" or environment.get("KMP_BLOCKTIME") == "infinite":
        return warning(
            "OpenMP threads keep the cores busy while they wait",
            "unset OMP_WAIT_POLICY and KMP_BLOCKTIME, because processes share the cores",
        )
    counts = [f"{name}={environment[name]}" for name in THREAD_COUNTS if environment.get(name)]
    return ok((", ".join(counts) or "nothing set") + "; each process of a run gets its own thread count")


CHECKS = (
    Check(TOPIC, "cores", cores),
    Check(TOPIC, "load", load),
    Check(TOPIC, "thread settings", threads),
)
