"""`areal-like doctor [--bench] [--json]`: reports what this machine has, what is missing, and how to install it.

Changes nothing on the machine. Checks are in topics/, measurements in bench/, layout in page.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from controller.doctor import page
from controller.doctor.catalogue import all_checks
from controller.doctor.finding import Check, Line
from controller.doctor.machine import Machine
from controller.doctor.runner import run_checks

Say = Callable[[Sequence[str]], None]


def doctor(*, bench: bool, as_json: bool, checks: Sequence[Check] | None = None, machine: Machine | None = None) -> int:
    """Run all checks, or `checks`, and print the results.

    Exit status: 0 all requirements of the quickstart are met, 1 otherwise.
    """
    machine = machine or Machine()
    try:
        with _waiting_line() as say:
            lines = run_checks(all_checks() if checks is None else checks, machine, say)
            if bench:
                lines += _bench(machine, say)
    finally:
        machine.end()
    if as_json:
        sys.stdout.write(page.as_json(lines))
    else:
        page.show(lines)
    return page.exit_status(lines)


def _bench(machine: Machine, say: Say) -> list[Line]:
    from controller.doctor.bench.measures import measure_all

    return measure_all(machine, say)


@contextlib.contextmanager
def _waiting_line() -> Iterator[Say]:
    """Show the running checks on stderr if it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda names: None
        return
    try:
        from rich.console import Console
    except ImportError:
        yield lambda names: None
        return
    console = Console(stderr=True, highlight=False)
    with console.status("") as status:
        yield lambda names: status.update(f"checking {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}")
