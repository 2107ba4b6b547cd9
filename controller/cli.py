"""The command line. `areal-like ...` and `python -m controller ...` are the same.

Owns: arguments, exit statuses, what a person reads on a mistake. Refuses: doing the work (job.py), knowing settings.
Exit status: 0 done; 1 the run failed; 2 the user's mistake, one `error:` line each and no traceback; 130 Ctrl-C.
The first thing is the look at Python and torch; nothing of ours, and no torch, is imported before.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controller.overrides import LoadedConfig
    from controller.preflight import Preflight, Purpose

PYTHON_RANGE = ((3, 11), (3, 13))
TORCH_RANGE = ((2, 11), (2, 15))

_EPILOG = """\
CONFIG is a YAML file, a run's folder, or the name of a shipped config ({shipped}).
key.path=value overrides one key, with a YAML value: num_steps=40 trainer.optimizer.lr=3e-5 data.eval=null
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    fault = python_fault(sys.version_info[:2]) or torch_fault(_installed("torch"))
    if fault:
        return _complain(fault)
    from areal_like.errors import OperationError, UserError

    try:
        from areal_like.shadow import check_not_shadowed

        check_not_shadowed()
        return _run(_parser().parse_args(argv))
    except UserError as error:
        return _complain(str(error))
    except OperationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `areal-like reference | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _complain(text: str) -> int:
    """Print each line as an error of the user's; exit status 2."""
    for line in text.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2


# ---------------------------------------------------------------- Python and torch


def python_fault(found: tuple[int, ...]) -> str:
    """Why this Python will not do; empty if it will."""
    low, high = PYTHON_RANGE
    if low <= found[:2] <= high:
        return ""
    needed = f"areal_like runs on Python {_dotted(low)} to {_dotted(high)}"
    return f"{needed}, and this is {_dotted(found[:2])} ({sys.executable})"


def torch_fault(found: str | None) -> str:
    """Why this torch will not do; empty if it will. Reads the installed version only, imports nothing."""
    low, high = TORCH_RANGE
    needed = f"areal_like runs on torch {_dotted(low)} to {_dotted(high)}"
    if found is None:
        return f"{needed}, and none is installed here ({sys.executable})"
    try:
        parts = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    except ValueError:
        return f"{needed}, and this one calls itself {found}"
    return "" if low <= parts <= high else f"{needed}, and this is {found} ({sys.executable})"


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))


def _installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    """Argparse whose complaints look like all others."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(_complain(f"{message} (see {self.prog} --help)"))


def _parser() -> argparse.ArgumentParser:
    from areal_like import __version__
    from controller.overrides import shipped_configs

    top = _Parser(prog="areal-like", description="Asynchronous reinforcement learning for language models.")
    top.add_argument("--version", action="version", version=f"areal-like {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    epilog = _EPILOG.format(shipped=", ".join(shipped_configs()))
    for name, text in (
        ("train", "run a job"),
        ("validate", "print the resolved config with its derived numbers, or every error at once"),
        ("sft", "supervised steps only (warm_start); out=FOLDER says where the model goes"),
        ("eval", "score a model on data.eval; model.path=FOLDER names the checkpoint"),
    ):
        command = commands.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("config", metavar="CONFIG", help="YAML file or shipped config")
        command.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help="override one key")
    resume = commands.add_parser("resume", help="continue an interrupted or crashed run")
    resume.add_argument("run", metavar="RUN", help="a run's folder, or its name in runs/")
    commands.add_parser("reference", help="print the reference page of every key")
    return top


def _run(arguments: argparse.Namespace) -> int:
    command = arguments.command
    if command == "reference":
        from controller.reference import reference_page

        sys.stdout.write(reference_page())
        return 0
    if command == "resume":
        from controller.run_folder import RunFolder

        folder = RunFolder.find(arguments.run)
        from controller import job

        return job.resume(folder.root)

    from controller.overrides import load_config

    loaded = load_config(arguments.config, arguments.overrides)
    found = _preflight(loaded, command)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    if command == "validate":
        from controller.resolved import resolved_page

        sys.stdout.write(resolved_page(loaded, found))
        return 0
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    from controller import job

    if command == "train":
        return job.train(loaded.config, source=loaded.source)
    return job.sft(loaded.config) if command == "sft" else job.evaluate(loaded.config)


def _preflight(loaded: LoadedConfig, purpose: Purpose) -> Preflight:
    """Look at the machine. Raises ConfigError with everything that stands in the way."""
    from controller.config_problems import ConfigError
    from controller.preflight import look

    found = look(loaded.config, purpose)
    problems = found.problems + ([] if purpose == "validate" else found.absent)
    if problems:
        raise ConfigError([problem.placed(loaded.document.where) for problem in problems], loaded.source)
    return found
