"""Checks of the monotonic clock and the wall clock."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

from controller.doctor.finding import NOT_HERE, Check, Finding, absent, ok, warning
from controller.doctor.machine import Machine

TOPIC = "Clock"
COARSE_S = 1e-3
DAY_S = 86_400.0
EARLIEST_S, LATEST_S = 1_735_689_600.0, 4_102_444_800.0
"""2025 and 2100."""
TIME_ERROR = 5


def step_s(clock_name: str, look_s: float = 0.02) -> float:
    """The smallest difference between two readings of a clock."""
    read = {"monotonic": time.monotonic, "time": time.time}[clock_name]
    smallest, before = float("inf"), read()
    until_s = time.perf_counter() + look_s
    while time.perf_counter() < until_s:
        now = read()
        if now > before:
            smallest = min(smallest, now - before)
        before = now
    return smallest


def resolution(machine: Machine) -> Finding:
    """Check the resolution of the clocks."""
    steps_s = {name: max(step_s(name), time.get_clock_info(name).resolution) for name in ("monotonic", "time")}
    words = f"monotonic {_text(steps_s['monotonic'])}, wall {_text(steps_s['time'])}"
    if max(steps_s.values()) > COARSE_S:
        return warning(words, "times in metrics and traces have a low resolution; nothing else is affected", **steps_s)
    return ok(words, **steps_s)


def _text(seconds: float) -> str:
    return (
        f"{seconds * 1e9:.0f} ns" if seconds < 1e-6 else f"{seconds * 1e6:.3g} us" if seconds < 1 else f"{seconds:g} s"
    )


def date(machine: Machine, *, now_s: float | None = None) -> Finding:
    """Check that the date is plausible: not before the program's own files were made."""
    now_s = time.time() if now_s is None else now_s
    made_s = Path(__file__).stat().st_mtime
    text = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(max(now_s, 0.0), LATEST_S)))
    if not EARLIEST_S < now_s < LATEST_S or now_s < made_s - DAY_S:
        return warning(
            f"the time {text} cannot be correct",
            "set the clock: certificates and the order of files depend on the time",
        )
    return ok(text, time_s=now_s)


def synchronisation(machine: Machine) -> Finding:
    """Check whether the kernel reports the clock as synchronised; this matters with several hosts."""
    if not machine.is_linux:
        return NOT_HERE
    state = kernel_clock_state()
    if state is None:
        return absent("the kernel does not report whether the clock is synchronised")
    if state == TIME_ERROR:
        return absent("not synchronised", "only needed with several hosts: install chrony or systemd-timesyncd")
    return ok("synchronised (NTP or similar)")


def kernel_clock_state() -> int | None:
    """Call adjtimex(2) in read mode: TIME_OK (0) to TIME_ERROR (5); None if not available."""
    if not sys.platform.startswith("linux"):
        return None
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    return None if state < 0 else int(state)


CHECKS = (
    Check(TOPIC, "resolution", resolution),
    Check(TOPIC, "date", date),
    Check(TOPIC, "synchronisation", synchronisation),
)
