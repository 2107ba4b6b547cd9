"""The ten promises: numbered, each with a command, the same in the README, and kept by a recorded run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from recorded_run import make_recorded_run

from controller.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = ROOT / "docs" / "promises.md", ROOT / "README.md"
NUMBERED = re.compile(r"^(?:## )?(\d+)\. (.+)$", re.MULTILINE)


def sections() -> list[tuple[str, list[list[str]]]]:
    """Each promise with its commands, as words."""
    found = []
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, rest = part.partition("\n")
        lines = [line for block in re.findall(r"^```sh\n(.*?)^```$", rest, re.M | re.S) for line in block.splitlines()]
        found.append((title, [shlex.split(line) for line in lines]))
    return found


def readable() -> list[list[str]]:
    """Commands that only read a run and need no model."""
    kinds = ("verify", "report", "status")
    commands = [words for _, commands in sections() for words in commands]
    return [words[1:] for words in commands if words[0] == "areal-like" and words[1] in kinds and "--spot" not in words]


def test_there_are_ten_each_with_a_command_and_readme_lists_the_same() -> None:
    found = sections()
    assert [title.split(".")[0] for title, _ in found] == [str(number) for number in range(1, 11)]
    assert all(commands for _, commands in found)
    listed = README.read_text().partition("## Ten promises")[2].partition("\n## ")[0]
    assert NUMBERED.findall(listed) == NUMBERED.findall("\n".join(title for title, _ in found))


@pytest.mark.parametrize("words", readable(), ids=" ".join)
def test_a_recorded_run_keeps_the_promise(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_recorded_run(tmp_path)
    arguments = [str(run.root) if word == "RUN" else word for word in words]
    assert main(arguments) == 0, capsys.readouterr()


def test_a_broken_promise_is_an_exit_status_of_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_recorded_run(tmp_path)
    (segment, *_) = sorted((run.root / "segments").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(bytes(data))
    assert main(["verify", str(run.root)]) == 1
