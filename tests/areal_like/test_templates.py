"""Texts made out of rows: which names a template has, and what is none."""

from __future__ import annotations

import jinja2
import pytest

from areal_like.templates import compiled, fault_of, names_in


def test_what_comes_before_an_attribute_of_a_row_is_its_column_and_not_a_method() -> None:
    template = compiled("{{ row.items }} {{ row.title }} {{ words.upper() }}")
    assert template.render(row={"items": "two", "title": "a"}, words="b") == "two a B"


def test_the_last_newline_of_a_template_stays() -> None:
    assert compiled("{{ a }}\n").render(a=1) == "1\n"


def test_a_name_that_is_not_given_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        compiled("{{ a }}").render()
    with pytest.raises(jinja2.UndefinedError):
        compiled("{{ row.b }}").render(row={"a": 1})


def test_a_template_says_which_names_it_wants() -> None:
    assert names_in("{{ a }} {% for x in b %}{{ x.c }}{% endfor %}") == {"a", "b"}


def test_a_text_that_is_no_template_says_why() -> None:
    assert fault_of("{{ a }}") == ""
    assert fault_of("{{ a").startswith("is not a valid Jinja template (unexpected end")
