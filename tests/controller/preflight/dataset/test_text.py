"""Tokens: which texts count as the same."""

from __future__ import annotations

import pytest

from controller.preflight.dataset.port import text_of
from controller.preflight.dataset.text import tokens


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Compute 5!", "Compute 5"),
        ("Compute $n!$.", "Compute $n$."),
        ("Compute (n+1)!", "Compute (n+1)"),
        ("Compute 5!!", "Compute 5!"),
        ("Find f'(2).", "Find f(2)."),
        ("Solve y' = y.", "Solve y = y."),
        ("Solve y'' = y.", "Solve y' = y."),
        (".5 + .5", "5 + 5"),
        ("($.75)", "($75)"),
        ("one.5 apples", "one 0.5 apples"),
    ],
)
def test_other_problems_have_other_tokens(one: str, other: str) -> None:
    assert tokens(one) != tokens(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Tom buys apples!", "tom buys apples"),
        ("It is 5 o'clock.", "It is 5 o clock"),
        ("the students' (12) books", "the students (12) books"),
        (".5 + .5", "0.5 + 0.5"),
        ("He said: 'Go.'", "He said “go”"),
        ("1,000 apples, 5", "1000 apples 5"),
    ],
)
def test_punctuation_does_not_count(one: str, other: str) -> None:
    assert tokens(one) == tokens(other)


def test_signs_of_languages_without_spaces_are_tokens() -> None:
    assert tokens("小明有5个苹果。") == ["小", "明", "有", "5", "个", "苹", "果"]
    assert tokens("リンゴはいくつ？") == list("リンゴはいくつ")


def test_the_parts_of_a_message_are_its_text() -> None:
    parts = [{"type": "text", "text": "Look at this."}, {"type": "image"}, {"type": "text", "text": "What is it?"}]
    assert text_of([{"role": "user", "content": parts}]) == "Look at this.\nWhat is it?"
