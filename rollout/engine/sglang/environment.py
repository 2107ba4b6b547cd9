"""SGLang's Python environment: finds the interpreter, checks the version, and lists the arguments of its launcher.

It runs the interpreter in a separate process with a deadline, and caches the result next to the environment. It imports
neither torch nor SGLang, because `validate` and `doctor` use it too. Torch-free: `validate` and `doctor` use it too.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from areal_like.errors import UserError
from areal_like.guarded_process import run_guarded

KNOWN_VERSION = "0.5.23"
"""The supported version, whose control endpoints were tested; others are refused."""
PYTHON = ".venv-sglang/bin/python"
"""The default interpreter; `make sglang-cpu` creates its environment."""
ASK_TIMEOUT_S = 120.0
CPU_VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1"}
"""Make SGLang run on a CPU."""
_WHERE = "rollout.engine.python"
_HOW = (
    "make sglang-cpu (for GPUs: python3 -m venv .venv-sglang, then pip install 'sglang==" + KNOWN_VERSION + "' there)"
)

_VERSIONS = """
import importlib.metadata as m, json, sys
found = {"python": sys.version.split()[0]}
for name in ("sglang", "torch", "transformers"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""
_ARGUMENTS = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
table = {}
for action in parser._actions:
    for flag in action.option_strings:
        if flag.startswith("--"):
            table[flag[2:]] = {
                "takes_value": action.nargs != 0,
                "takes_many": action.nargs in ("+", "*") or isinstance(action.nargs, int) and action.nargs > 1,
                "choices": [str(c) for c in action.choices] if action.choices else [],
            }
json.dump(table, open(sys.argv[1], "w"))
"""


class Argument(msgspec.Struct, frozen=True):
    """One argument of the launcher. `choices` is empty if any value is allowed."""

    takes_value: bool
    takes_many: bool
    choices: tuple[str, ...] = ()


def find_python(setting: str) -> Path:
    """The interpreter that `rollout.engine.python` names. Raises UserError if it does not exist."""
    wanted = Path(setting).expanduser()
    checkout = Path(__file__).resolve().parents[3]
    for path in [wanted] if wanted.is_absolute() else [Path.cwd() / wanted, checkout / wanted]:
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise UserError(f"there is no Python interpreter at {setting}", where=_WHERE, remedy=_HOW)


def clean_environment() -> dict[str, str]:
    """This process's environment variables, without those that would make packages of our environment importable in
    another one."""
    foreign = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    return {name: value for name, value in os.environ.items() if name not in foreign}


def versions(python: Path) -> dict[str, str]:
    """Versions of python, sglang, torch and transformers there; packages that are not installed are left out. Raises
    UserError."""
    answer = _ask(python, [_VERSIONS], timeout_s=30.0)
    try:
        found = json.loads(answer)
    except ValueError:
        raise UserError(f"{python} printed an unexpected result ({answer[:80]!r})", where=_WHERE, remedy=_HOW) from None
    return {str(name): str(version) for name, version in found.items()}


def check_version(python: Path) -> dict[str, str]:
    """`versions`, if SGLang's is the supported one. Raises UserError, which says what differs and why it matters."""
    found = versions(python)
    have = found.get("sglang")
    if have is None:
        raise UserError(f"SGLang is not installed in the environment of {python}", where=_WHERE, remedy=_HOW)
    if have != KNOWN_VERSION:
        raise UserError(
            f"SGLang {have} is installed for {python}, but {KNOWN_VERSION} is required: pausing, weight updates and "
            "the policy versions of tokens differ between SGLang releases, and a wrong policy version would give wrong "
            "importance ratios",
            where=_WHERE,
            remedy=f"{python} -m pip install 'sglang=={KNOWN_VERSION}', or build another environment: {_HOW}",
        )
    return found


def argument_table(python: Path, *, is_cpu: bool, version: str = KNOWN_VERSION) -> dict[str, Argument]:
    """Arguments of SGLang's launcher, by name without dashes. They are read once per environment. Raises UserError."""
    cached = _cache_path(python, version)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(cached.read_bytes(), type=dict[str, Argument])
    with tempfile.TemporaryDirectory(prefix="areal_like-ask-") as folder:
        answer = Path(folder) / "arguments.json"
        _ask(python, [_ARGUMENTS, str(answer)], timeout_s=ASK_TIMEOUT_S, extra=CPU_VARIABLES if is_cpu else {})
        try:
            data = answer.read_bytes()
            table = msgspec.json.decode(data, type=dict[str, Argument])
        except (OSError, msgspec.MsgspecError) as error:
            raise UserError(f"{python} did not list SGLang's arguments ({error})", where=_WHERE, remedy=_HOW) from error
        with contextlib.suppress(OSError):  # in a read-only environment they are read again each time
            temporary = cached.with_name(f"{cached.name}.{os.getpid()}")
            temporary.write_bytes(data)
            os.replace(temporary, cached)
    return table


def _cache_path(python: Path, version: str) -> Path:
    """The cache file inside the environment's folder; a reinstalled environment is a new folder, and is read again."""
    name = hashlib.sha256(version.encode()).hexdigest()[:12]
    return python.parent.parent / f".areal_like-arguments-{name}.json"


def argument_words(given: Mapping[str, Any], table: Mapping[str, Argument], where: str) -> list[str]:
    """Command-line words of further arguments. Raises UserError for one that this version does not accept."""
    words: list[str] = []
    for name, value in given.items():
        plain = name.lstrip("-").replace("_", "-")
        argument = table.get(plain)
        if argument is None:
            near = difflib.get_close_matches(plain, table, n=1)
            remedy = (
                f"did you mean {near[0]}?"
                if near
                else "see python -m sglang.launch_server --help in SGLang's environment"
            )
            raise UserError(f"SGLang {KNOWN_VERSION} has no argument `{name}`", where=where, remedy=remedy)
        if value is None or value is False:
            if argument.takes_value and value is False:
                raise UserError(f"`{name}` takes a value, not {value}", where=where, remedy="give a value, or null")
            continue
        if value is True and argument.takes_value:
            raise UserError(f"`{name}` takes a value", where=where, remedy=_example(plain, argument))
        if value is not True and not argument.takes_value:
            raise UserError(f"`{name}` takes no value", where=where, remedy=f"{{{plain}: true}}")
        parts = str(value).split() if argument.takes_many else [str(value)]
        if argument.choices and not argument.takes_many and str(value) not in argument.choices:
            raise UserError(
                f"`{name}` cannot be `{value}`", where=where, remedy=f"one of {', '.join(argument.choices[:20])}"
            )
        words += [f"--{plain}", *([] if value is True else parts)]
    return words


def clashing(given: Iterable[str], ours: Iterable[str]) -> list[str]:
    """Names in `given` that this program sets itself."""
    reserved = set(ours)
    return [name for name in given if name.lstrip("-").replace("_", "-") in reserved]


def _example(name: str, argument: Argument) -> str:
    return f"{{{name}: {argument.choices[0] if argument.choices else '...'}}}"


def _ask(python: Path, words: list[str], *, timeout_s: float, extra: Mapping[str, str] | None = None) -> str:
    """Standard output of `python -c ...`. Raises UserError if it fails."""
    try:
        environment = {**clean_environment(), **(extra or {})}
        ran = run_guarded([str(python), "-c", *words], timeout_s=timeout_s, env=environment)
    except subprocess.TimeoutExpired:
        raise UserError(f"{python} gave no result within {timeout_s:g} s", where=_WHERE, remedy=_HOW) from None
    except OSError as error:
        raise UserError(f"{python} cannot be started ({error.strerror})", where=_WHERE, remedy=_HOW) from error
    if ran.returncode != 0:
        last = (ran.stderr.strip().splitlines() or [f"status {ran.returncode}"])[-1]
        raise UserError(f"{python} failed: {last[:200]}", where=_WHERE, remedy=_HOW)
    return ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ""
