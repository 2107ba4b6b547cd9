"""The modules that are mutated: all of the shipped packages but what is left out here, by pattern.

A pattern stands for a file or a folder at any depth, so that moving a module into a sub-package changes nothing. One
with a slash stands for a path: a common name must not leave out modules that decide what becomes of samples.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

PACKAGES = ("areal_like", "controller", "rollout", "trainer", "services")

LEFT_OUT: dict[str, str] = {
    "__init__": "no code",
    "__main__": "starts a process; end-to-end tests hold it",
    # what is shown to a user
    "report": "pages and pictures",
    "runs": "commands on run folders",
    "doctor": "looks at the machine",
    "telemetry": "sinks",
    "display": "terminal output",
    "summary": "terminal output",
    "step_reporter": "terminal output",
    "cli": "command lines",
    "controller/config/schema": "generated reference",
    "reference_page": "generated reference",
    "resolved_page": "terminal output",
    "foreign_keys": "suggestions for other systems' keys",
    "metrics": "names of metrics",
    "trace": "names of events",
    # needs processes, kernels or devices that unit tests stand in for
    "launch": "starts processes",
    "sglang": "a server of its own",
    "sandbox": "kernel confinement",
    "forkserver": "forks",
    "process": "signals",
    "process_tree": "signals",
    "user_check": "starts a process",
    "check_*": "starts a process",
    "backends": "optional libraries",
    "device": "devices",
    "ranks": "several processes",
    # simulation and stand-ins
    "simulate": "simulator",
    "emulation": "simulator",
    "emulated*": "simulator",
    "controller/runtime/session": "starts a run",
    # set-up before the first sample; its mistakes show at once
    "problems": "set-up",
    "derived": "set-up",
    "jobs": "set-up",
    "model_folder": "set-up",
    "model_init": "set-up",
    "preflight": "set-up",
    "model_preparation": "set-up",
    "prepare*": "set-up",
    "run_folder": "set-up",
    "user_code": "set-up",
    "yaml_document": "set-up",
    "convert": "set-up",
    "export": "set-up",
    "import_check": "set-up",
    "ports": "set-up",
    "making": "set-up",
    "checkpoint_arguments": "set-up",
    "reasoning_gym*": "optional library",
    "textarena": "optional library",
    "gymnasium": "optional library",
    "verifiers*": "optional library",
    "sft": "warm start",
    # tables without decisions
    "run_config": "declarations",
    "cluster_settings": "declarations",
    "messages": "declarations",
    "limits": "declarations",
    "events": "declarations",
    "effects": "declarations",
    "errors": "declarations",
    "syscall_numbers": "declarations",
}


def reason_left_out(module: PurePosixPath) -> str:
    """Why a module is not mutated; empty for a core module."""
    if module.stem == "config":
        return "declarations"
    return next((why for pattern, why in LEFT_OUT.items() if is_match(module, pattern)), "")


def is_match(module: PurePosixPath, pattern: str) -> bool:
    """A pattern with a slash is of the whole path, without suffix; another is of any folder or the file."""
    if "/" in pattern:
        return fnmatch(str(module.with_suffix("")), pattern)
    return any(fnmatch(part, pattern) for part in (*module.parts[1:-1], module.stem))


FOLDERS_LEFT_OUT = ("e2e", "mutation", "docs", "benchmarks", "sglang", "report", "doctor", "simulate")
"""Of tests."""
BEGINNINGS_LEFT_OUT = ("test_sandbox", "test_sglang_", "test_sink")
"""Of the names of test files: they take long and are about modules that are left out."""


TESTS_OF_DECLARATIONS = ("tests/test_struct_declarations.py", "tests/areal_like/weights/test_transfer_descriptors.py")
"""They look at what modules declare, so no line that they execute says what they hold: every change of code that runs
at import."""


def is_test_of_core(file: PurePosixPath) -> bool:
    """Whether the lines that a test file executes are worth knowing."""
    return not file.name.startswith(BEGINNINGS_LEFT_OUT) and not set(file.parts) & set(FOLDERS_LEFT_OUT)


def core_modules(root: Path) -> list[PurePosixPath]:
    """Paths, relative to the root, of all modules that are mutated."""
    files = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    relative = sorted(PurePosixPath(path.relative_to(root).as_posix()) for path in files)
    return [module for module in relative if not reason_left_out(module)]
