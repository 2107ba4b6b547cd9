"""Checks of the engines that run in a separate Python environment: whether it exists, and which version it has.

One check per engine that declares such an environment in its descriptor. Modules of that environment are not imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from controller.doctor import versions
from controller.doctor.finding import Check, Finding, absent, ok, warning
from controller.doctor.machine import Machine

TOPIC = "Optional"
_VERSIONS_THERE = (
    "import importlib.metadata as m, json, sys\n"
    "found = {}\n"
    "for name in (*sys.argv[1:], 'torch', 'transformers'):\n"
    "    try: found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: pass\n"
    "print(json.dumps(found))"
)


def own_environment(title: str, *, python: str, package: str, build: str) -> Callable[[Machine], Finding]:
    """Make the check of one engine, in its separate environment or in this one.

    Args:
        title: the engine in messages.
        python: the interpreter of its environment, relative to the current folder.
        package: its distribution.
        build: the command that builds the environment on a machine without a GPU.
    """
    own = Path(python).expanduser()

    def look(machine: Machine) -> Finding:
        entry = versions.required_of(package)
        known = entry.text.partition("==")[2] or "unknown"
        how = f"{build}; for GPUs: python3 -m venv {own.parents[1]} && {own.parent}/pip install '{entry.text}'"
        there: dict[str, str] = {}
        if own.is_file():
            ran = machine.run([str(own.absolute()), "-I", "-c", _VERSIONS_THERE, package], deadline_s=20)
            try:
                there = json.loads(ran.out)
            except ValueError:
                return warning(
                    f"the interpreter {own} does not work: {ran.fault or 'no output'}",
                    f"rebuild the environment of {title}: {how}",
                )
            if package not in there:
                return warning(
                    f"{title} is not installed in the environment of {own}", f"{own.parent}/pip install '{entry.text}'"
                )
            if "torch" not in there:
                return warning(
                    f"{title} is installed in the environment of {own}, but torch is not",
                    f"rebuild the environment of {title}: {how}",
                )
            found = there[package]
            words = f"{found} in {own.parents[1]} (torch {there['torch']})"
        else:
            found = machine.version(package)
            if not found:
                return absent("not installed; the embedded engine does not need it", f"optional: {how}")
            words = (
                f"{found} in this environment; in a separate environment its version pins cannot conflict with others"
            )
        data = {"version": found, "known": known, "environment": there}
        if not entry.admits(found):
            return warning(
                f"{words}; {known} is the tested version",
                f"install the tested version in the same environment: pip install '{entry.text}'",
                **data,
            )
        return ok(words, **data)

    return look


def checks() -> tuple[Check, ...]:
    """One check per engine with a separate environment; none if the engines cannot be listed, which other checks
    report.
    """
    try:
        from controller.config.engines import REGISTERED
    except Exception:  # the import of a damaged package may raise any exception, which other checks report
        return ()
    described = [(engine.title, engine.environment) for engine in REGISTERED.values()]
    return tuple(
        Check(TOPIC, title, own_environment(title, python=own.python, package=own.package, build=own.build))
        for title, own in described
        if own is not None
    )
