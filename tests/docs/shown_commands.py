"""The commands that the README and the pages of the documentation show, in blocks and in the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "decisions" and path.name != "reference.md")
README = REPOSITORY / "README.md"
SHELL = ("", "sh", "bash", "console")
"""Languages of blocks in which a line may be a command; in other blocks a command is a comment."""
PROGRAM = re.compile(r"(?:^|(?<=\s))(?:areal-like|python|make)(?=\s)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language as written after the fence, and its text without the indentation of the fence."""

    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    language: str | None = None
    indent, lines = "", list[str]()
    for line in page.read_text().splitlines():
        fence = re.match(r"( *)```(.*)$", line)
        if language is None and fence:
            indent, language, lines = fence[1], fence[2].strip(), []
        elif language is not None and fence and not fence[2]:
            yield Block(language, "".join(f"{one}\n" for one in lines))
            language = None
        elif language is not None:
            lines.append(line.removeprefix(indent))
    assert language is None, f"{page.name}: a block is not closed"


def inline_code(page: Path) -> Iterator[str]:
    """Inline code; in the tables of another system's names only our column."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    ours: int | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            ours = None
        elif "Here" in cells:
            ours = cells.index("Here")
        yield from re.findall(r"`([^`]+)`", cells[ours] if cells and ours is not None else line)


def texts(page: Path, language: str) -> Iterator[str]:
    """Blocks of one language."""
    return (block.text for block in blocks(page) if block.language == language)


@dataclass(frozen=True)
class Command:
    """A command as words. `python -m controller` is `areal-like`; what starts it on another machine is left out."""

    words: tuple[str, ...]
    is_in_text: bool

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def is_whole(self) -> bool:
        """Whether it can be typed as it stands. In the text a command without arguments is a mention of its name."""
        if "COMMAND" in self.words or "--help" in self.words:
            return False
        return not self.is_in_text or any(not word.startswith("-") for word in self.words[2:])


def commands(page: Path) -> list[Command]:
    """Every command of areal-like, Python and make that a page shows."""
    found = [Command(words, is_in_text=False) for block in blocks(page) for words in _of_block(block, page)]
    for code in inline_code(page):
        if code.startswith(("areal-like ", "python -m ")):
            found += [Command(words, is_in_text=True) for words in _words(code, page)]
    return found


def _of_block(block: Block, page: Path) -> Iterator[tuple[str, ...]]:
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        shown = line.strip().removeprefix("$ ")
        if block.language not in SHELL:
            comment = re.match(r"#\s*(areal-like [a-z-]+ .*)$", shown)
            shown = comment[1] if comment else ""
        elif block.language == "console" and not line.startswith("$ "):  # output
            continue
        yield from _words(shown, page)


def _words(line: str, page: Path) -> Iterator[tuple[str, ...]]:
    """The command in a line, from its program on."""
    found = PROGRAM.search(line)
    if found is None or line.startswith("#"):
        return
    try:
        words = tuple(shlex.split(line[found.start() :], comments=True))
    except ValueError as error:
        raise ValueError(f"{page.name}: {line}: {error}") from error
    if words[:3] == ("python", "-m", "controller"):
        words = ("areal-like", *words[3:])
    if "..." not in words:
        yield words
