"""The Python interpreter that runs programs: its path, and the folders that it needs to read.

By default it is the one from which this process's environment was created, with only its standard library; an
interpreter that the user names has its installed packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache

from areal_like.guard import tied

FLAGS = ("-s", "-S", "-B", "-X", "utf8")
"""Options: no user site, no site module (packages are added to the path inside), no byte-code files."""
ASK_TIMEOUT_S = 120.0
_SYSTEM = ("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
_TOO_MUCH = ("/", "/usr", "/usr/local", "/opt", "/home", "/root")
"""Prefixes that contain more than a Python: only its own folders in them are visible."""

_QUESTION = """
import sys, os, json
for name in ("_socket", "resource", "_ctypes", "_decimal", "math", "zlib", "_hashlib", "_json", "_bz2", "_lzma"):
    try:
        __import__(name)
    except ImportError:
        pass
with open("/proc/self/maps") as file:
    mapped = {line.split(None, 5)[5].strip() for line in file if line.count("/")}
import sysconfig
paths = sysconfig.get_paths()
print(json.dumps({
    "executable": os.path.realpath(sys.executable), "prefix": sys.base_prefix, "exec_prefix": sys.base_exec_prefix,
    "stdlib": [paths["stdlib"], paths["platstdlib"]], "packages": [paths["purelib"], paths["platlib"]],
    "mapped": sorted(mapped), "version": list(sys.version_info[:3]), "implementation": sys.implementation.name,
}))
"""


class NoInterpreter(Exception):
    """The interpreter cannot be run, or its description is invalid."""


@dataclass(frozen=True)
class Interpreter:
    """executable: the program to start. shown: files and folders that it needs to read; hidden: folders within them
    that it must not read.

    packages: folders of installed packages; empty for only the standard library.
    """

    executable: str
    shown: tuple[str, ...]
    hidden: tuple[str, ...]
    packages: tuple[str, ...]
    version: tuple[int, ...]
    implementation: str


@lru_cache(maxsize=8)
def find_interpreter(python: str = "") -> Interpreter:
    """The interpreter at this path, or (empty) the one behind this process. Raises NoInterpreter."""
    chosen = python or getattr(sys, "_base_executable", sys.executable) or sys.executable
    command = [chosen, "-I", *([] if python else ["-S"]), "-c", _QUESTION]
    try:
        answer = subprocess.run(
            tied(command), capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True, env={}
        )
        facts = json.loads(answer.stdout)
        packages = tuple(path for path in dict.fromkeys(facts["packages"]) if python and os.path.isdir(path))
        executable = os.path.abspath(chosen) if python else facts["executable"]
        shown = _shown(facts, executable, packages)
    except subprocess.CalledProcessError as error:
        raise NoInterpreter(f"{chosen} failed: {error.stderr.strip()[-300:]}") from error
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        raise NoInterpreter(f"{chosen} cannot be used ({type(error).__name__}: {error})") from error
    hidden = () if python else tuple(path for path in _package_folders(facts) if _is_under(path, shown))
    return Interpreter(executable, shown, hidden, packages, tuple(facts["version"]), facts["implementation"])


def _shown(facts: dict[str, list[str] | str], executable: str, packages: tuple[str, ...]) -> tuple[str, ...]:
    real = str(facts["executable"])
    wanted = [path for path in _SYSTEM if os.path.isdir(path)]
    for prefix in (str(facts["prefix"]), str(facts["exec_prefix"])):
        wanted += [os.path.join(prefix, "lib")] if prefix not in _TOO_MUCH else []
    wanted += [*facts["stdlib"], *packages, real, executable]
    if executable != real:  # a virtual environment: its configuration file and links lead to the real one
        wanted += [os.path.join(os.path.dirname(os.path.dirname(executable)), "pyvenv.cfg"), *_links_of(executable)]
    wanted += [path for path in facts["mapped"] if path.startswith("/") and not _is_under(path, wanted)]
    kept: list[str] = []
    for path in sorted(dict.fromkeys(wanted)):
        if os.path.exists(path) and not _is_under(path, kept):
            kept.append(path)
    return tuple(kept)


def _links_of(path: str) -> list[str]:
    """Every path between a link and its target."""
    found: list[str] = []
    while os.path.islink(path) and len(found) < 16:
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        found.append(path)
    return found


def _package_folders(facts: dict[str, list[str] | str]) -> list[str]:
    """Folders of installed packages within the visible folders."""
    found = [*facts["packages"]]
    for stdlib in facts["stdlib"]:
        found += [os.path.join(stdlib, "site-packages"), os.path.join(stdlib, "dist-packages")]
    found += ["/usr/lib/python3/dist-packages"]
    return [path for path in dict.fromkeys(found) if os.path.isdir(path)]


def _is_under(path: str, folders: list[str] | tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)
