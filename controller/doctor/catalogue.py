"""All checks, in the order they are shown. A new check is a function in a file of topics/ and an entry in its
CHECKS.
"""

from __future__ import annotations

from controller.doctor.finding import Check
from controller.doctor.topics import (
    clock,
    disk,
    engines,
    limits,
    memory,
    network,
    packages,
    processor,
    python,
    sandbox,
    torch_build,
)


def all_checks() -> tuple[Check, ...]:
    """All checks in order. Imports the configuration, which lists the engines."""
    return (
        *python.CHECKS, *torch_build.CHECKS, *processor.CHECKS, *memory.CHECKS, *limits.CHECKS, *network.CHECKS,
        *disk.CHECKS, *clock.CHECKS, *sandbox.CHECKS, *engines.checks(), *packages.CHECKS,
    )  # fmt: skip
