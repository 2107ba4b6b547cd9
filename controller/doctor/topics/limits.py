"""Checks of the limits on open files and processes of this user."""

from __future__ import annotations

import math

from controller.doctor import cgroups
from controller.doctor.finding import Check, Finding, ok, problem, warning
from controller.doctor.machine import Machine

TOPIC = "Limits"
QUICKSTART_FILES = 48
"""The controller of the quickstart has 31 open files, more than any other of its processes."""
GOOD_FILES = 1024
QUICKSTART_PROCESSES = 100
"""The quickstart on two cores has 36 processes and threads; with more cores torch has more."""
GOOD_PROCESSES = 1000


def _words(value: float) -> str:
    return "no limit" if math.isinf(value) else f"{value:,.0f}"


def open_files(machine: Machine) -> Finding:
    """Check the limit on open files: sockets, logs and segments; each worker adds a few in the controller."""
    soft, hard = machine.limit("RLIMIT_NOFILE")
    words = f"{_words(soft)} (can be raised to {_words(hard)})" if hard > soft else _words(soft)
    data = {"soft": None if math.isinf(soft) else soft, "hard": None if math.isinf(hard) else hard}
    raise_it = f"run ulimit -n {65536 if hard >= 65536 else f'{hard:.0f}'} before you start a run"
    raise_it += "" if hard >= GOOD_FILES else ", after raising the hard limit in /etc/security/limits.conf"
    if soft < QUICKSTART_FILES:
        return problem(words, raise_it, **data)
    if soft < GOOD_FILES:
        return warning(f"{words}, which is enough for a small run", f"for a run with many workers, {raise_it}", **data)
    return ok(words, **data)


def processes(machine: Machine) -> Finding:
    """Check how many processes and threads can still be started."""
    soft, _ = machine.limit("RLIMIT_NPROC")
    group = cgroups.processes(machine)
    system = machine.text("/proc/sys/kernel/threads-max")
    used = machine.num_own_threads()
    left = min(
        soft - used, math.inf if group is None else group[0] - group[1], float(system) if system.isdigit() else math.inf
    )
    words = f"{_words(soft)} for this user" + (f", {used:,} used" if used else "")
    words += f", {group[0] - group[1]:,} more in this control group" if group else ""
    data = {"soft": None if math.isinf(soft) else soft, "left": None if math.isinf(left) else left}
    how = "ulimit -u 65536" if group is None or soft - used < group[0] - group[1] else "docker run --pids-limit 4096"
    if left < QUICKSTART_PROCESSES:
        return problem(words, f"raise the limit: {how}; each worker has about twelve threads", **data)
    if left < GOOD_PROCESSES:
        return warning(
            f"{words}, which is enough for a small run", f"for a run with many workers, raise the limit: {how}", **data
        )
    return ok(words, **data)


CHECKS = (
    Check(TOPIC, "open files", open_files, is_needed=True),
    Check(TOPIC, "processes", processes, is_needed=True),
)
