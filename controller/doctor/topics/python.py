"""Checks of Python, this installation, and required packages.

torch is checked in torch_build.py, optional packages in packages.py.
"""

from __future__ import annotations

import platform
import struct
import sys

from areal_like.errors import UserError
from areal_like.import_check import check_not_shadowed
from controller.doctor import versions
from controller.doctor.finding import Check, Finding, ok, problem, warning
from controller.doctor.machine import Machine
from controller.doctor.remedies import remedy

TOPIC = "Python"
OWN_LINES = ("torch", "transformers", "math-verify")
"""Required packages with a separate check."""


def interpreter(machine: Machine) -> Finding:
    """Check the Python version against the tested range."""
    from controller.doctor.supported_versions import python_fault

    found = tuple(sys.version_info[:2])
    data = {"version": platform.python_version(), "executable": sys.executable}
    if fault := python_fault(found):
        return problem(
            fault,
            "build the environment with a different Python version, for example with make PYTHON=python3.12",
            **data,
        )
    if struct.calcsize("P") != 8:
        return problem(f"{platform.python_version()}, 32 bit", "torch requires a 64-bit Python", **data)
    words = f"{platform.python_version()}, {sys.executable}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return warning(
            f"{words}, free-threaded", "only the standard build is tested; use python3.13 instead of python3.13t"
        )
    return ok(words, **data)


def installation(machine: Machine) -> Finding:
    """Check that the five packages are this program's, and not others of the same name."""
    import areal_like

    try:
        check_not_shadowed()
    except UserError as error:
        return problem(f"{error.where}: {error.what}" if error.where else error.what, error.remedy)
    installed = machine.version(versions.DISTRIBUTION)
    place = str(areal_like.__path__[0]).removesuffix("/areal_like")
    return ok(
        f"areal_like {areal_like.__version__}{'' if installed else ' (not installed: run from its folder)'}, {place}"
    )


def packages(machine: Machine) -> Finding:
    """Check every required package against its declared range."""
    needed = [entry for entry in versions.declared() if not entry.extra and entry.package not in OWN_LINES]
    if not needed:
        return warning("the list of required packages cannot be read", "install areal_like again (pip install -e .)")
    found = {entry.text: machine.version(entry.package) for entry in needed}
    missing = [text for text, version in found.items() if not version]
    wrong = [
        f"{entry.package} {found[entry.text]} (needs {entry.text})"
        for entry in needed
        if found[entry.text] and not entry.admits(found[entry.text])
    ]
    data = {"packages": {entry.package: found[entry.text] for entry in needed}}
    if missing:
        texts = " ".join(f"'{text}'" for text in missing)
        return problem(f"missing packages: {', '.join(missing)}", f"pip install {texts}", **data)
    if wrong:
        return problem(f"packages with a wrong version: {', '.join(wrong)}", "pip install -r requirements.lock", **data)
    return ok(", ".join(f"{entry.package} {found[entry.text]}" for entry in needed), **data)


def transformers(machine: Machine) -> Finding:
    """Check that transformers can make and run a tiny Qwen3, in a separate process."""
    entry = versions.required_of("transformers")
    found = machine.version("transformers")
    if not found:
        return problem("not installed", f"pip install '{entry.text}'")
    if not entry.admits(found):
        return problem(
            f"{found} is installed, but {entry.text} is required", f"pip install '{entry.text}'", version=found
        )
    answer = machine.probe("tiny_model", deadline_s=80)
    if not answer.data:
        advice = remedy(
            answer.fault, f"install it again: {sys.executable} -m pip install --force-reinstall transformers"
        )
        return problem(f"{found} cannot run a tiny Qwen3 model: {answer.fault}", advice, version=found)
    if not answer.data.get("is_finite"):
        return problem(
            f"{found}: a tiny Qwen3 model outputs non-finite numbers",
            "install torch and transformers again",
            version=found,
        )
    return ok(f"{found}, runs a tiny Qwen3", version=found)


def math_verify(machine: Machine) -> Finding:
    """Check that math-verify parses and compares; its antlr4 parser is easily broken by another package's pin."""
    entry = versions.required_of("math-verify")
    found = machine.version("math-verify")
    if not found:
        return problem("not installed", f"pip install '{entry.text}'")
    if not entry.admits(found):
        return warning(
            f"{found} is installed, but {entry.text} is required", f"pip install '{entry.text}'", version=found
        )
    answer = machine.probe("maths", deadline_s=30)
    if not answer.data:
        return warning(
            f"{found} does not work: {answer.fault}",
            "the installed antlr4-python3-runtime may be incompatible: pip install --force-reinstall math-verify "
            "latex2sympy2_extended",
            version=found,
        )
    if not answer.data.get("same") or answer.data.get("other"):
        return warning(
            f"{found} compares numbers incorrectly",
            "pip install --force-reinstall math-verify",
            version=found,
        )
    return ok(f"{found}, accepts 1/2 as 0.5", version=found)


CHECKS = (
    Check(TOPIC, "Python", interpreter, is_needed=True),
    Check(TOPIC, "areal_like", installation, is_needed=True),
    Check(TOPIC, "packages", packages, is_needed=True),
    Check(TOPIC, "transformers", transformers, deadline_s=90, is_needed=True),
    Check(TOPIC, "math-verify", math_verify, deadline_s=40),
)
