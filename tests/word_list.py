"""The word list: terms that were replaced, and what to write instead. `make words` prints where any of them is left.

    python tests/word_list.py [FILE ...]

Identifiers are split at underscores and capitals, so `is_told` and `ToldAgain` are found as well. A line that must keep
a term is exempt by an entry of EXEMPT, with the reason.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

REPLACED = {
    "told": "notified, reported, passed, given",
    "anew": "again, re-",
    "beside": "next to, alongside, in addition to",
    "mend|mends|mended|mending": "fix, correct, repair, recover",
    "whoever": "the process that, anyone who",
    "heard": "received",
    "parcel|parcels": "payload",
    "to be had": "available",
    "lie in|lies in": "is stored in, is in",
    "in good order": "gracefully, normally",
    "for ever": "indefinitely",
    "struck off": "removed",
    "so-manieth": "N-th",
    "goes home|go home": "saves and exits",
    "ground floor": "bottom layer",
    "wing|wings": "package",
    "law \\d+|laws \\d+": "the name of the invariant (docs/architecture.md)",
    "ward|wards": "supervised process",
    "whom nobody awaits|which nobody awaits": "unexpected",
    "barren|desolate|deserted": "name the condition",
    "lay down|laid down|rouse|roused": "terminate, suspend, resume",
    "retold": "announced again",
    "birth": "creation, start",
    "deed|deeds": "action, fault",
    "idlest": "least loaded",
    "lest": "so that not, to avoid",
    "thereby|therein": "by this, in this",
    "whence|thence|whither": "from where, from there, where",
    "hitherto|heretofore|henceforth|forthwith": "until now, from now on, immediately",
    "afresh|aught|naught|asunder": "again, anything, nothing, apart",
    "amidst|amongst|whilst|perchance": "among, while, possibly",
    "befall|befalls|befell|befallen": "happen to, affect",
    "foretell|foretells|foretold": "predict",
    "is spared|are spared|was spared": "is saved, is avoided",
    "tossed": "random",
    "of one's own": "your own, the user's",
    "hands in|handed in the|may hand in": "submits",
    "(?-i:Owns:|Refuses:)": "what the module contains, in sentences",
}
"""Terms as regular expressions of whole words, and their replacements."""

EXEMPT = {
    "tests/word_list.py": "the list itself",
    "tests/test_word_list.py": "its test",
    "docs/decisions/": "records of their time",
    "benchmarks/results/": "written by benchmarks",
    "docs/pictures/": "drawn from benchmark results",
    "controller/report/vendored/": "published files of another project, unchanged",
}
"""Files, and folders by their last slash, that are not checked, with the reason."""

EXEMPT_LINES = {
    "beside_per_s": "key of published benchmark results",
    "beside_bare": "key of published benchmark results",
}
"""Texts that make a line exempt, with the reason."""

TEXTS = (".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".lock", ".html", ".css", ".js", ".sh", ".jinja")
PATTERNS = {
    re.compile(rf"(?<![a-z])(?:{term.replace(' ', '[ _]')})(?![a-z])", re.IGNORECASE): words
    for term, words in REPLACED.items()
}
ANY = re.compile("|".join(pattern.pattern for pattern in PATTERNS), re.IGNORECASE)
CAPITALS = re.compile(r"(?<=[a-z])(?=[A-Z])")


def tracked_files() -> list[Path]:
    """Text files of the checkout that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return [REPOSITORY / name for name in listed if name.endswith(TEXTS) or Path(name).name in ("Makefile", "LICENSE")]


def is_exempt(name: str) -> bool:
    return any(name == entry or (entry.endswith("/") and name.startswith(entry)) for entry in EXEMPT)


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, term and replacement of every replaced term in a text."""
    for number, line in enumerate(text.splitlines(), 1):
        if any(exempt in line for exempt in EXEMPT_LINES):
            continue
        separated = CAPITALS.sub("_", line)
        if not ANY.search(separated):
            continue
        for pattern, replacement in PATTERNS.items():
            if match := pattern.search(separated):
                yield number, match[0], replacement


def main(arguments: list[str]) -> int:
    paths = [Path(one).resolve() for one in arguments] or tracked_files()
    count = 0
    for path in paths:
        name = str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)
        if is_exempt(name) or not path.is_file():
            continue
        for number, term, replacement in findings(path.read_text(errors="replace")):
            print(f"{name}:{number}: {term!r} -> {replacement}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
