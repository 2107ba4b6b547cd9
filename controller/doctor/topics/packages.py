"""Checks of optional packages: other trainers, clusters, data, and metrics sinks.

Uses installed versions and files; nothing is imported. Required packages are in python.py, engines in engines.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from controller.doctor import versions
from controller.doctor.finding import Check, Finding, absent, ok, warning
from controller.doctor.machine import Machine

TOPIC = "Optional"


def deepspeed(machine: Machine) -> Finding:
    """Check DeepSpeed, and whether its kernels can be compiled on first use."""
    found, entry = machine.version("deepspeed"), versions.required_of("deepspeed")
    how = versions.how_to_install("deepspeed")
    if not found:
        return absent("not installed", f"optional, for ZeRO: {how}")
    ninja, compiler, built = machine.which("ninja"), _compiler(machine), _built_ops(machine)
    data = {"version": found, "ninja": ninja, "compiler": compiler, "built_ops": built}
    if not entry.admits(found):
        return warning(f"{found} is installed, but {entry.text} is required", how, **data)
    if ninja and compiler:
        words = f"{found}; ninja and {Path(compiler).name} are installed"
        words += (
            f", built beforehand: {', '.join(built)}" if built else ", kernels compile on first use (a minute each)"
        )
        return ok(words, **data)
    if not compiler:
        missing, how = "a C++ compiler" if ninja else "ninja and a C++ compiler", "apt install g++ ninja-build"
    elif machine.version("ninja"):
        missing, how = (
            "ninja on PATH (although it is installed)",
            f"activate the environment: PATH={Path(sys.executable).parent}:$PATH",
        )
    else:
        missing, how = "ninja", "pip install ninja"
    words = f"{found}, but {missing} is missing, so kernels that are compiled on first use will fail"
    return warning(
        words,
        f"{how}; or avoid these kernels by using torch's AdamW without offloading, and on CPUs by not using "
        "deepspeed_shm_comm",
        **data,
    )


def _compiler(machine: Machine) -> str:
    names = (machine.environment.get("CXX", ""), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := machine.which(name))), "")


def _built_ops(machine: Machine) -> list[str]:
    """Kernels that this DeepSpeed was built with, read from its own record without importing it."""
    folder = machine.package_folder("deepspeed")
    record = machine.text(f"{folder}/git_version_info_installed.py") if folder else ""
    table = re.search(r"installed_ops\s*=\s*(\{.*?\})", record, re.DOTALL)
    return sorted(re.findall(r"'(\w+)': True", table.group(1))) if table else []


def plain(package: str, what_for: str) -> Callable[[Machine], Finding]:
    """Make a check of presence and version only."""

    def look(machine: Machine) -> Finding:
        found, entry = machine.version(package), versions.required_of(package)
        if not found:
            return absent("not installed", f"{what_for}: {versions.how_to_install(package)}")
        if not entry.admits(found):
            return warning(
                f"{found} is installed, but {entry.text} is required",
                f"{what_for}: pip install '{entry.text}'",
                version=found,
            )
        return ok(found, version=found)

    return look


CHECKS = (
    Check(TOPIC, "Ray", plain("ray", "optional, for clusters")),
    Check(TOPIC, "DeepSpeed", deepspeed),
    Check(TOPIC, "datasets", plain("datasets", "optional, for data sets from the hub")),
    Check(TOPIC, "TensorBoard", plain("tensorboard", "optional, metrics")),
    Check(TOPIC, "wandb", plain("wandb", "optional, metrics")),
    Check(TOPIC, "Prometheus", plain("prometheus-client", "optional, metrics")),
)
