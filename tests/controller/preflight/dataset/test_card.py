"""Cards: what is counted, and that memory is bounded by classes and samples."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from controller.preflight.dataset import card, languages
from controller.preflight.dataset.card import CardMaker, Lengths
from controller.preflight.dataset.columns import Columns
from controller.preflight.dataset.croissant import croissant
from controller.preflight.dataset.port import Row

COLUMNS = Columns("prompt", "answer")


def made(*fields: dict[str, object]) -> card.Card:
    maker = CardMaker(COLUMNS)
    for number, one in enumerate(fields, 1):
        maker.add(Row(number, f"rows.jsonl:{number}", one, COLUMNS))
    return maker.card()


def test_rows_columns_lengths_and_repeated_prompts_are_counted() -> None:
    found = made(
        {"prompt": "abc", "answer": 1},
        {"prompt": "ABC ", "answer": None, "x": [1]},
        {"prompt": "abcdef", "answer": "12"},
    )
    assert found.num_rows == 3
    assert found.num_repeated == 1
    assert found.columns == {"prompt": {"text": 3}, "answer": {"integer": 1, "null": 1, "text": 1}, "x": {"list": 1}}
    assert found.lengths["answer"] == {"count": 2, "mean": 1.5, "min": 1, "p5": 1, "p50": 1, "p95": 2, "max": 2}
    assert found.lengths["solution"] == {"count": 0}


def test_quantiles_are_within_a_quarter_of_the_exact_ones() -> None:
    rng, lengths = random.Random(1), Lengths()
    values = [rng.randrange(1, 5_000) for _ in range(2_000)]
    for value in values:
        lengths.add(value)
    found = lengths.as_dict()
    for share, name in ((0.05, "p5"), (0.5, "p50"), (0.95, "p95")):
        exact = float(np.quantile(values, share))
        assert exact / 1.25 <= found[name] <= exact * 1.25 + 1
    assert len(lengths.classes) < 45


def test_samples_for_languages_are_bounded_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "MAX_DETECTED", 10)
    maker = CardMaker(COLUMNS)
    for number in range(500):
        maker.add(Row(number, "", {"prompt": str(number), "answer": "1"}, COLUMNS))
    assert len(maker._samples) < 20
    assert int(maker._samples[-1]) > 400


def test_without_the_library_languages_are_not_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "py3langid.langid", None)
    found = made({"prompt": "abc", "answer": 1})
    assert found.languages is None
    assert "the `data` extra is not installed" in found.as_markdown("set", {"sources": []})


def test_english_is_recognised_without_the_library() -> None:
    assert languages.is_english("How many of the apples are there if she eats two each day?")
    assert not languages.is_english("Wie viele von den Kindern in the Klasse tragen eine Brille und warum?")
    assert not languages.is_english("Find x.")


def test_croissant_names_file_and_columns_of_one_type() -> None:
    found = made({"prompt": "abc", "answer": 1, "note": None}, {"prompt": "b", "answer": "2", "note": "x"})
    page = json.loads(croissant("set", found, "rows.jsonl", {"bytes": 12, "sha256": "ab"}))
    assert page["distribution"][0]["sha256"] == "ab"
    assert page["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    fields = {field["name"]: field for field in page["recordSet"][0]["field"]}
    assert set(fields) == {"prompt", "note"}
    assert fields["prompt"]["source"] == {"fileObject": {"@id": "rows.jsonl"}, "extract": {"column": "prompt"}}


def test_half_a_surrogate_pair_in_a_name_can_be_printed() -> None:
    found = made({"prompt": "abc", "\udc80": "x"})
    assert "\\udc80" in found.as_markdown("set", {"sources": []}).encode().decode()
    page = found.as_json({"sources": []}, is_ascii=True).encode().decode()
    assert "\udc80" in json.loads(page)["columns"]
