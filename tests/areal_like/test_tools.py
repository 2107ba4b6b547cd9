"""Functions as tools: their schema, and which arguments they take."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from areal_like.errors import UserError
from areal_like.tools import Tool, WrongArguments, load_tools, tool_of

WHERE = "reward.environment.options.tools"


def search(
    query: str,
    kind: Literal["web", "news"] = "web",
    limit: int | None = None,
    tags: list[str] = [],  # noqa: B006
    by: dict[str, float] = {"date": 1.0},  # noqa: B006
) -> str:
    """Search the archive
    for documents.

    Args:
        query: what to look for,
            in words.
        limit (int): at most so many: all, if None.

    Returns:
        Titles.
    """
    tags.append("seen")
    return f"{query}/{kind}/{limit}/{tags}/{by}"


async def later(x: int) -> int:
    return x + 1


GIVEN = Tool(name="given", description="", parameters={"type": "object"}, run=lambda arguments: len(arguments))
ALL = [search, GIVEN]


def test_schema_holds_types_defaults_and_what_the_docstring_says() -> None:
    declaration = tool_of(search).declaration["function"]
    assert declaration["description"] == "Search the archive for documents."
    properties = declaration["parameters"]["properties"]
    assert properties["query"] == {"type": "string", "description": "what to look for, in words."}
    assert properties["kind"] == {"enum": ["news", "web"], "default": "web"}
    assert properties["limit"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert properties["limit"]["description"] == "at most so many: all, if None."
    assert properties["tags"] == {"type": "array", "items": {"type": "string"}, "default": []}
    assert properties["by"]["additionalProperties"] == {"type": "number"}
    assert declaration["parameters"]["required"] == ["query"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "missing required field `query`"),
        ({"query": 3}, "Expected `str`, got `int` - at `$.query`"),
        ({"query": "a", "kind": "radio"}, "Invalid enum value 'radio'"),
        ({"query": "a", "page": 2}, "unknown field `page`"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(WrongArguments) as caught:
        tool_of(search).run(arguments)
    assert words in str(caught.value)


def test_checked_arguments_reach_the_function() -> None:
    assert (
        tool_of(search).run({"query": "a", "kind": "news", "tags": ["b"]}) == "a/news/None/['b', 'seen']/{'date': 1.0}"
    )
    assert asyncio.run(tool_of(later).run({"x": 1})) == 2


def no_annotation(x):  # type: ignore[no-untyped-def]
    return x


def strange(x: asyncio.Event) -> None: ...


def several(*names: str) -> None: ...


def unresolved(x: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_annotation, "parameter x of tool no_annotation has no annotation"),
        (strange, "annotations of tool strange cannot be expressed in JSON"),
        (several, "parameter names of tool several cannot be passed by name"),
        (unresolved, "annotation of tool unresolved cannot be resolved"),
        (lambda: 1, "not a named function"),
        (dict, "not a named function"),
        (3, "not a named function"),
    ],
)
def test_function_that_is_no_tool_is_refused_in_one_sentence(function: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        tool_of(function, where=WHERE)
    assert words in str(caught.value)
    assert str(caught.value).startswith(WHERE)


def test_tools_are_found_by_import_path_and_built_in_name() -> None:
    found = load_tools([f"{__name__}:ALL", f"{__name__}:later", "own"], {"own": f"{__name__}:make_strong"}, WHERE)
    assert list(found) == ["search", "given", "later", "strong"]


def strong() -> str:
    return "text"


def make_strong() -> Tool:
    return tool_of(strong)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["sqrt"], "no tool `sqrt` -> own, or module:FUNCTION"),
        ([f"{__name__}:serch"], "did you mean"),
        ([f"{__name__}:search", f"{__name__}:ALL"], "two tools have the name search"),
    ],
)
def test_names_that_lead_to_no_tool_are_refused(names: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_tools(names, {"own": f"{__name__}:make_strong"}, WHERE)
    assert words in str(caught.value)
