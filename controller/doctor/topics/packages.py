"""What is optional: another engine, another trainer, clusters, data, and places for metrics.

Owns: the checks, each from installed versions and files, without an import. Refuses: what is required (python.py).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from controller.doctor import versions
from controller.doctor.finding import Check, Finding, absent, ok, warning
from controller.doctor.machine import Machine

TOPIC = "Optional"
SGLANG_PYTHON = Path(".venv-sglang/bin/python")
"""Where an environment of SGLang's own is looked for, relative to the current folder."""
_VERSIONS_THERE = (
    "import importlib.metadata as m, json, sys\n"
    "found = {}\n"
    "for name in ('sglang', 'torch', 'transformers'):\n"
    "    try: found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: pass\n"
    "print(json.dumps(found))"
)


def sglang(machine: Machine) -> Finding:
    """SGLang, in an environment of its own or in this one."""
    entry = versions.required_of("sglang")
    known = entry.text.partition("==")[2] or "unknown"
    own_environment = f"python3 -m venv {SGLANG_PYTHON.parents[1]} && {SGLANG_PYTHON.parent}/pip install '{entry.text}'"
    how = f"make sglang-cpu; for GPUs: {own_environment}"
    own = Path(getattr(_engine_settings(), "python", "") or SGLANG_PYTHON).expanduser()
    if own.is_file():
        ran = machine.run([str(own.absolute()), "-I", "-c", _VERSIONS_THERE], deadline_s=20)
        try:
            there = json.loads(ran.out)
        except ValueError:
            return warning(f"{own} does not work: {ran.fault or 'no answer'}", f"rebuild that environment: {how}")
        if "sglang" not in there:
            return warning(f"{own} has no SGLang", f"{own.parent}/pip install '{entry.text}'")
        if "torch" not in there:
            return warning(f"{own} has SGLang without torch", f"rebuild that environment: {how}")
        words, found = f"{there['sglang']} in {own.parents[1]} (torch {there['torch']})", there["sglang"]
    else:
        found = machine.version("sglang")
        if not found:
            return absent("not installed; the embedded engine needs none", f"optional: {how}")
        words, there = (
            f"{found} in this environment; in a separate environment its version pins cannot conflict with ours",
            {},
        )
    data = {"version": found, "known": known, "environment": there}
    if not entry.admits(found):
        return warning(f"{words}; {known} is the tested version", f"pip install '{entry.text}' there", **data)
    return ok(words, **data)


def _engine_settings() -> object:
    """The engine's default settings, where they can be read."""
    try:
        from controller.config.run_config import RolloutSettings
    except ImportError:  # a required package is missing, and has its own line
        return None
    return RolloutSettings().engine


def deepspeed(machine: Machine) -> Finding:
    """DeepSpeed, and whether it could compile what it compiles on first use."""
    found, entry = machine.version("deepspeed"), versions.required_of("deepspeed")
    how = versions.how_to_install("deepspeed")
    if not found:
        return absent("not installed", f"optional, for ZeRO: {how}")
    ninja, compiler, built = machine.which("ninja"), _compiler(machine), _built_ops(machine)
    data = {"version": found, "ninja": ninja, "compiler": compiler, "built_ops": built}
    if not entry.admits(found):
        return warning(f"{found}, and {entry.text} is needed", how, **data)
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
            "ninja on PATH (it is installed)",
            f"activate the environment: PATH={Path(sys.executable).parent}:$PATH",
        )
    else:
        missing, how = "ninja", "pip install ninja"
    words = f"{found}, without {missing}: what it compiles on first use fails"
    return warning(words, f"{how}; or do without: torch's AdamW, no offload, on CPUs no deepspeed_shm_comm", **data)


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
    """A check of nothing but presence and version."""

    def look(machine: Machine) -> Finding:
        found, entry = machine.version(package), versions.required_of(package)
        if not found:
            return absent("not installed", f"{what_for}: {versions.how_to_install(package)}")
        if not entry.admits(found):
            return warning(
                f"{found}, and {entry.text} is needed", f"{what_for}: pip install '{entry.text}'", version=found
            )
        return ok(found, version=found)

    return look


CHECKS = (
    Check(TOPIC, "SGLang", sglang, deadline_s=30),
    Check(TOPIC, "Ray", plain("ray", "optional, for clusters")),
    Check(TOPIC, "DeepSpeed", deepspeed),
    Check(TOPIC, "datasets", plain("datasets", "optional, for data sets from the hub")),
    Check(TOPIC, "TensorBoard", plain("tensorboard", "optional, metrics")),
    Check(TOPIC, "wandb", plain("wandb", "optional, metrics")),
    Check(TOPIC, "Prometheus", plain("prometheus-client", "optional, metrics")),
)
