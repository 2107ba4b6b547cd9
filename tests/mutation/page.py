"""The score: overall, by package, by operator, and every survivor with its change."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.mutation.trial import AT_IMPORT, KILLED, SURVIVED, TIMEOUT, UNCOVERED, Result

CAUGHT = (KILLED, AT_IMPORT, TIMEOUT)


def equivalents(file: Path) -> dict[str, str]:
    """Reasons by mutant: blocks of keys, one a line, and an indented reason that they share."""
    found: dict[str, str] = {}
    keys: list[str] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        if line.startswith((" ", "\t")):
            found |= {key: f"{found[key]} {line.strip()}".strip() for key in keys}
        elif not line.strip():
            keys = []
        elif not line.startswith("#"):
            keys.append(line.strip())
            found[keys[-1]] = ""
    return found


def reason(key: str, judged: dict[str, str]) -> str:
    """Why a mutant is equivalent; empty where it is not judged to be. `*` in a judged key stands for anything."""
    for pattern, why in judged.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), key):
            return why
    return ""


def share(results: Iterable[Result]) -> str:
    counted = Counter(result.outcome for result in results)
    caught, total = sum(counted[outcome] for outcome in CAUGHT), sum(counted.values())
    return f"{caught}/{total} = {100 * caught / max(total, 1):.1f} %"


def print_score(results: list[Result], judged: Path, threshold: float, say: Callable[[str], None]) -> int:
    known = equivalents(judged)
    equal = [result for result in results if reason(result.drawn.key, known) and result.outcome not in CAUGHT]
    counted = [result for result in results if result not in equal]
    outcomes = Counter(result.outcome for result in results)
    say(", ".join(f"{outcome} {number}" for outcome, number in outcomes.most_common()) + f", equivalent {len(equal)}")
    for title, part in (
        ("package", lambda r: r.drawn.module.split("/")[0]),
        ("operator", lambda r: r.drawn.mutant.operator),
    ):
        groups: dict[str, list[Result]] = defaultdict(list)
        for result in counted:
            groups[part(result)].append(result)
        say(f"by {title}: " + ", ".join(f"{name} {share(group)}" for name, group in sorted(groups.items())))
    for result in counted:
        if result.outcome in (SURVIVED, UNCOVERED):
            say(f"\n{result.outcome}: {result.drawn.place} ({result.detail})")
            say("\n".join(f"    {line}" for line in result.drawn.diff()))
            say(f"    key: {result.drawn.key}")
    caught = sum(result.outcome in CAUGHT for result in counted)
    say(f"\nscore {share(counted)} of mutants that are not equivalent; at least {threshold} % is asked for")
    return int(100 * caught < threshold * max(len(counted), 1))
