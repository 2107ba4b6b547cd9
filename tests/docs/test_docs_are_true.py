"""What the documentation names exists: keys, commands, options, benchmarks, files, messages, results."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from shown_commands import DOCS, PAGES, README, REPOSITORY, commands, inline_code, texts

from areal_like.settings import Settings
from benchmarks.tables import TABLES
from controller.config.offline_config import OfflineConfig
from controller.config.run_config import RunConfig
from controller.config.schema import field_at

SOURCES = ("areal_like", "controller", "rollout", "services", "trainer")
FILE_SUFFIXES = (".jsonl", ".sqlite", ".log", ".py", ".json", ".md", ".yaml", ".html", ".png")
ROOTS: tuple[type[Settings], ...] = (RunConfig, OfflineConfig)
SECTIONS = {name for root in ROOTS for name in root.model_fields}
SMALLEST_FRAGMENT = 8
"""Shorter pieces of a message say nothing."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
with_readme = pytest.mark.parametrize("page", [README, *PAGES], ids=lambda path: str(path.relative_to(REPOSITORY)))


def is_key(path: str, roots: tuple[type[Settings], ...] = (RunConfig,)) -> bool:
    """Whether a dotted path names a key of a config; below a free mapping anything goes."""
    parts = tuple("0" if part.isdigit() else part for part in path.split("."))
    return any(
        field_at(root, parts[:end]) is not None and (end == len(parts) or is_free(parts[:end]))
        for root in roots
        for end in range(1, len(parts) + 1)
    )


def is_free(parts: tuple[str, ...]) -> bool:
    """A mapping whose keys are the user's."""
    free = ("options", "backend_options", "workflow_options", "init", "columns", "chat_template_kwargs", "headers")
    return parts[-1] in free


@pages
def test_every_key_named_in_the_text_exists(page: Path) -> None:
    named = {
        match[1]
        for code in inline_code(page)
        if (match := re.match(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?:[=:]|$)", code.strip("'")))
        and match[1].split(".")[0] in SECTIONS
        and not match[1].endswith(FILE_SUFFIXES)
    }
    if page.name == "coming-from.md":
        named -= {"data.train_batch_size"}  # of verl, in a formula of our column
    roots = ROOTS if page.name == "offline.md" else (RunConfig,)
    assert not [name for name in sorted(named) if not is_key(name, roots)]


def leaves(value: object, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and not (path and is_free(tuple(path.split(".")))):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{index}")
    elif path:
        yield path


@pages
def test_every_key_of_a_yaml_example_exists(page: Path) -> None:
    for block in texts(page, "yaml"):
        assert not [path for path in leaves(yaml.safe_load(block)) if not is_key(path)], block


@with_readme
def test_every_areal_like_command_parses_and_its_overrides_name_keys(page: Path) -> None:
    from controller.cli.arguments import make_parser

    complaints: list[str] = []

    def complain(message: str) -> int:
        complaints.append(message)
        return 2

    parser = make_parser(complain)
    for command in commands(page):
        if not command.is_whole or command.words[0] != "areal-like":
            continue
        try:
            arguments = parser.parse_args(command.words[1:])
        except SystemExit:
            pytest.fail(f"{command}: {complaints}")
        for override in getattr(arguments, "overrides", []):
            assert is_key(override.split("=")[0]), f"{command}: {override}"


@with_readme
def test_every_module_that_is_run_exists(page: Path) -> None:
    for words in (command.words for command in commands(page)):
        if words[:2] == ("python", "-m"):
            module = REPOSITORY / words[2].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), " ".join(words)


@pages
def test_every_shipped_file_named_in_the_text_exists(page: Path) -> None:
    for code in inline_code(page):
        if re.fullmatch(r"(configs|benchmarks|areal_like|docs)/[\w./-]*", code) and "NAME" not in code:
            is_result = code.startswith("benchmarks/results/") and code.endswith(".json")
            assert is_result or (REPOSITORY / code).exists(), code


@cache
def templates() -> tuple[str, ...]:
    """Every text in the code, with … for what is filled in."""
    found = set()
    for source in SOURCES:
        for path in (REPOSITORY / source).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                    found.add("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return tuple(found)


def quoted_messages() -> list[str]:
    """What the page of troubles quotes: code in its headings, and in the first column of its table of waits."""
    found = []
    for line in (DOCS / "troubleshooting.md").read_text().splitlines():
        if line.startswith("### ") or (line.startswith("| `") and "…" in line.split("|")[1]):
            found += re.findall(r"`([^`]+)`", line.split("|")[1] if line.startswith("|") else line)
    return found


@pytest.mark.parametrize("message", quoted_messages())
def test_every_quoted_message_is_one_of_ours(message: str) -> None:
    seams = r"…|->|[();]|: |rollout-0|\b\d+(?:\.\d+)*\b|signal SIGKILL|prepare| s for |Address already in use"
    fragments = [part.strip(" :,") for part in re.split(seams, message)]
    for fragment in fragments:
        if len(fragment) >= SMALLEST_FRAGMENT:
            assert any(fragment in template for template in templates()), fragment


@pages
def test_every_result_named_in_the_text_has_a_table(page: Path) -> None:
    for name in re.findall(r"^<!-- measured: (\w+) -->$", page.read_text(), re.MULTILINE):
        assert name in TABLES, name


@pages
def test_every_table_has_its_header(page: Path) -> None:
    """An empty line ends a table: the rows after it would be shown as text."""
    lines = ["", *page.read_text().splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert re.fullmatch(r"\|[\s:|-]+\|", after), f"{page.name}: {line[:60]}"
