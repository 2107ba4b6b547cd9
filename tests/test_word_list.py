"""The word list finds replaced terms in prose and identifiers, and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("word_list", Path(__file__).with_name("word_list.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
word_list = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(word_list)


@pytest.mark.parametrize(
    "line",
    [
        "it was told",
        "def is_told_twice",
        "class ToldAgain",
        "lies in memory",
        "test_for_ever",
        "law 3 holds",
        "Owns: it.",
    ],
)
def test_a_replaced_term_is_found_with_its_replacement(line: str) -> None:
    ((number, term, replacement),) = word_list.findings(f"first\n{line}")
    assert number == 2
    assert term
    assert replacement


@pytest.mark.parametrize(
    "line", ["recommended", "amendment", "families in", "the beside_per_s key", "forever", "refuses: no"]
)
def test_parts_of_other_words_and_exempt_keys_are_not(line: str) -> None:
    assert list(word_list.findings(line)) == []


def test_a_found_term_is_printed_with_file_and_line_and_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = tmp_path / "bad.md", tmp_path / "good.md"
    bad.write_text("Fine.\nRun it anew.\n")
    good.write_text("Run it again.\n")
    assert word_list.main([str(good)]) == 0
    assert word_list.main([str(bad)]) == 1
    assert "bad.md:2: 'anew' -> again, re-" in capsys.readouterr().out
