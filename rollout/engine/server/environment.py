"""The Python environment of a server: finds the interpreter, checks its versions, and lists its launcher's arguments.

It runs the interpreter in a separate process with a deadline, and caches the result next to the environment. It imports
neither torch nor the server's packages, because `validate` and `doctor` use it too.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from areal_like.errors import UserError
from areal_like.guarded_process import run_guarded

ASK_TIMEOUT_S = 120.0
_WHERE = "rollout.engine.python"
_VERSIONS = """
import importlib.metadata as m, json, sys
found = {"python": sys.version.split()[0]}
for name in %r:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""
_TABLE = """
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


def clean_environment() -> dict[str, str]:
    """This process's environment variables, without those that would make packages of our environment importable in
    another one."""
    foreign = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    return {name: value for name, value in os.environ.items() if name not in foreign}


@dataclass(frozen=True)
class ServerEnvironment:
    """The environment of one engine's servers."""

    title: str
    """Name in messages."""
    package: str
    """Distribution whose version is checked."""
    known_version: str
    """The supported version, whose control endpoints were tested; others are refused."""
    remedy: str
    """How to build the environment."""
    help_command: str
    """Prints the launcher's arguments."""
    parser: str
    """Code that makes the launcher's argument parser, `parser`."""
    cpu_variables: Mapping[str, str] = field(default_factory=dict)
    """Make it run on a CPU."""

    def find_python(self, setting: str) -> Path:
        """The interpreter that `rollout.engine.python` names. Raises UserError if it does not exist."""
        wanted = Path(setting).expanduser()
        checkout = Path(__file__).resolve().parents[3]
        for path in [wanted] if wanted.is_absolute() else [Path.cwd() / wanted, checkout / wanted]:
            if path.is_file() and os.access(path, os.X_OK):
                return path
        raise UserError(f"there is no Python interpreter at {setting}", where=_WHERE, remedy=self.remedy)

    def versions(self, python: Path) -> dict[str, str]:
        """Versions of python, the package, torch and transformers there; packages that are not installed are left out.
        Raises UserError."""
        answer = self._ask(python, [_VERSIONS % ((self.package, "torch", "transformers"),)], timeout_s=30.0)
        try:
            found = json.loads(answer)
        except ValueError:
            what = f"{python} printed unexpected output ({answer[:80]!r})"
            raise UserError(what, where=_WHERE, remedy=self.remedy) from None
        return {str(name): str(version) for name, version in found.items()}

    def check_version(self, python: Path) -> dict[str, str]:
        """`versions`, if the package's is the supported one; a local part such as `+cpu` does not count. Raises
        UserError, which says what differs and why it matters."""
        found = self.versions(python)
        have = found.get(self.package)
        if have is None:
            what = f"{self.title} is not installed in the environment of {python}"
            raise UserError(what, where=_WHERE, remedy=self.remedy)
        if have.partition("+")[0] != self.known_version:
            raise UserError(
                f"{self.title} {have} is installed for {python}, but {self.known_version} is required, because "
                f"pausing, weight updates and the policy versions of tokens differ between {self.title} releases, and "
                "a wrong policy version would cause wrong importance ratios",
                where=_WHERE,
                remedy=f"{python} -m pip install '{self.package}=={self.known_version}', or build a new environment: "
                + self.remedy,
            )
        return found

    def argument_table(self, python: Path, *, is_cpu: bool) -> dict[str, Argument]:
        """Arguments of the launcher, by name without dashes. They are read once per environment. Raises UserError."""
        cached = _cache_path(python, self.known_version)
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(cached.read_bytes(), type=dict[str, Argument])
        with tempfile.TemporaryDirectory(prefix="areal_like-ask-") as folder:
            answer = Path(folder) / "arguments.json"
            words = [f"import argparse, json, sys\n{self.parser}\n{_TABLE}", str(answer)]
            self._ask(python, words, timeout_s=ASK_TIMEOUT_S, extra=self.cpu_variables if is_cpu else {})
            try:
                data = answer.read_bytes()
                table = msgspec.json.decode(data, type=dict[str, Argument])
            except (OSError, msgspec.MsgspecError) as error:
                what = f"{python} did not list {self.title}'s arguments ({error})"
                raise UserError(what, where=_WHERE, remedy=self.remedy) from error
            with contextlib.suppress(OSError):  # in a read-only environment they are read again each time
                temporary = cached.with_name(f"{cached.name}.{os.getpid()}")
                temporary.write_bytes(data)
                os.replace(temporary, cached)
        return table

    def argument_words(self, given: Mapping[str, Any], table: Mapping[str, Argument], where: str) -> list[str]:
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
                    else f"run {self.help_command} in {self.title}'s environment for a list"
                )
                what = f"{self.title} {self.known_version} has no argument `{name}`"
                raise UserError(what, where=where, remedy=remedy)
            words += _words_of(name, plain, value, argument, where)
        return words

    def _ask(self, python: Path, words: list[str], *, timeout_s: float, extra: Mapping[str, str] | None = None) -> str:
        """Standard output of `python -c ...`. Raises UserError if it fails."""
        try:
            environment = {**clean_environment(), **(extra or {})}
            ran = run_guarded([str(python), "-c", *words], timeout_s=timeout_s, env=environment)
        except subprocess.TimeoutExpired:
            what = f"{python} did not respond within {timeout_s:g} s"
            raise UserError(what, where=_WHERE, remedy=self.remedy) from None
        except OSError as error:
            what = f"{python} cannot be started ({error.strerror})"
            raise UserError(what, where=_WHERE, remedy=self.remedy) from error
        if ran.returncode != 0:
            last = (ran.stderr.strip().splitlines() or [f"status {ran.returncode}"])[-1]
            raise UserError(f"{python} failed: {last[:200]}", where=_WHERE, remedy=self.remedy)
        return ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ""


def clashing(given: Iterable[str], ours: Iterable[str]) -> list[str]:
    """Names in `given` that this program sets itself."""
    reserved = set(ours)
    return [name for name in given if name.lstrip("-").replace("_", "-") in reserved]


def _words_of(name: str, plain: str, value: Any, argument: Argument, where: str) -> list[str]:
    if value is None or value is False:
        if argument.takes_value and value is False:
            raise UserError(f"`{name}` requires a value, not {value}", where=where, remedy="set a value, or null")
        return []
    if value is True and argument.takes_value:
        raise UserError(f"`{name}` requires a value", where=where, remedy=_example(plain, argument))
    if value is not True and not argument.takes_value:
        raise UserError(f"`{name}` does not accept a value", where=where, remedy=f"write {{{plain}: true}}")
    parts = str(value).split() if argument.takes_many else [str(value)]
    if argument.choices and not argument.takes_many and str(value) not in argument.choices:
        raise UserError(
            f"`{name}` cannot be `{value}`", where=where, remedy=f"use one of {', '.join(argument.choices[:20])}"
        )
    return [f"--{plain}", *([] if value is True else parts)]


def _cache_path(python: Path, version: str) -> Path:
    """The cache file inside the environment's folder; a reinstalled environment is a new folder, and is read again."""
    name = hashlib.sha256(version.encode()).hexdigest()[:12]
    return python.parent.parent / f".areal_like-arguments-{name}.json"


def _example(name: str, argument: Argument) -> str:
    return f"{{{name}: {argument.choices[0] if argument.choices else '...'}}}"
