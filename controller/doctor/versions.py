"""Required packages of this installation, and comparison of versions with their bounds.

The bounds are only defined in pyproject.toml; an installed distribution includes them in its metadata.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

DISTRIBUTION = "areal-like"
_FORM = re.compile(r"^\s*([\w.-]+)\s*(?:\[[^\]]*\])?\s*([^;]*)(?:;\s*(.*))?$")
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w.-]+)["']""")


@dataclass(frozen=True)
class Requirement:
    """One package as declared. `bounds`: pairs such as (">=", "2.11"); `extra`: empty for required packages."""

    package: str
    bounds: tuple[tuple[str, str], ...] = ()
    extra: str = ""

    @property
    def text(self) -> str:
        """The requirement in pip's notation."""
        return self.package + ",".join(operator + version for operator, version in self.bounds)

    def admits(self, found: str) -> bool:
        """Return whether `found` is within the bounds. Post-, pre- and local parts of a version are ignored."""
        have = number(found)
        return all(_COMPARE[operator](_padded(have), _padded(number(version))) for operator, version in self.bounds)


_COMPARE = {
    ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, "<": lambda a, b: a < b,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "~=": lambda a, b: a >= b,
}  # fmt: skip


def number(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of `2.13.0rc1+cpu`."""
    match = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _padded(parts: tuple[int, ...]) -> tuple[int, ...]:
    return parts + (0,) * (6 - len(parts))


def parse(text: str, extra: str = "") -> Requirement | None:
    """Parse one line of a requirement list; None if it is not a simple requirement."""
    match = _FORM.match(text)
    if match is None:
        return None
    name, bounds, marker = match.groups()
    named = _EXTRA.search(marker or "")
    pairs = re.findall(r"(>=|<=|==|!=|~=|<|>)\s*([\w.*+-]+)", bounds)
    pairs.sort(key=lambda pair: pair[0] in ("<", "<="))  # installed metadata has them in any order
    return Requirement(name, tuple(pairs), named.group(1) if named else extra)


def declared() -> list[Requirement]:
    """All requirements of this installation, including extras; empty if they cannot be read."""
    try:
        lines: Iterable[tuple[str, str]] = [(line, "") for line in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:
        lines = _of_checkout(Path(__file__).resolve().parents[2] / "pyproject.toml")
    return [found for line, extra in lines if (found := parse(line, extra)) is not None]


def _of_checkout(path: Path) -> list[tuple[str, str]]:
    """Requirement lines of a checkout that is not installed, each with its extra."""
    try:
        project = tomllib.loads(path.read_text())["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return []
    optional = project.get("optional-dependencies", {})
    return [(line, "") for line in project.get("dependencies", [])] + [
        (line, extra) for extra, lines in optional.items() for line in lines
    ]


def required_of(package: str) -> Requirement:
    """The requirement of one package; a user extra has priority over the developer extra. Without bounds if not
    declared.
    """
    found = [entry for entry in declared() if _same(entry.package, package)]
    return min(found, key=lambda entry: entry.extra in ("dev", "bench"), default=Requirement(package))


def how_to_install(package: str) -> str:
    """The command that installs a package: by its extra, otherwise by its name."""
    entry = required_of(package)
    named = entry.extra and entry.extra not in ("dev", "bench")
    return f"pip install '{DISTRIBUTION}[{entry.extra}]'" if named else f"pip install '{entry.text}'"


def _same(one: str, other: str) -> bool:
    return re.sub(r"[-_.]+", "-", one).lower() == re.sub(r"[-_.]+", "-", other).lower()
