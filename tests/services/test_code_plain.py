"""Plain data across the sandbox's wall, both ways, and forged answers that never become anything else."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.judging import plain
from services.reward.judging.plain import MAX_DEPTH, Forged, NotPlain, Untagged, expression_of, read_answer
from services.reward.sandbox.inside_answering import Responder

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
    | st.decimals(allow_nan=False) | st.fractions() | st.dates() | st.datetimes() | st.timedeltas()
)  # fmt: skip
keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner) | st.sets(keys) | st.frozensets(keys)
    ),
    max_leaves=20,
)


def refuse(value: Any) -> str:
    raise NotPlain(type(value).__name__)


def same(left: Any, right: Any) -> bool:
    """Equal and of equal types all through; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return len(left) == len(right) and all(key in right and same(left[key], right[key]) for key in left)
    return bool(left == right)


@pytest.fixture(scope="module")
def inside() -> Responder:
    """The inside's reader and writer, outside of any sandbox."""
    import builtins

    from services.reward.sandbox import inside_answering, inside_writing

    for name in ("Writer", "tag", "CannotPass", "MAX_NAME_CHARS"):  # they share a namespace where they run
        setattr(inside_answering, name, getattr(inside_writing, name))
    assert builtins.len is len
    return Responder(-1, {})


@given(value=values)
def test_an_argument_arrives_as_it_was_sent(inside: Responder, value: Any) -> None:
    assert same(eval(expression_of(value, refuse), inside.environment), value)


@given(value=values)
def test_a_result_arrives_as_it_was_sent(inside: Responder, value: Any) -> None:
    message = f'{{"answer":{inside.write(value)}}}'.encode()
    assert same(read_answer(message, refuse_handle)["answer"], value)


def refuse_handle(number: int, what: str, name: str) -> Any:
    raise AssertionError(f"a handle on {name}")


@pytest.mark.parametrize(
    "value",
    [
        collections.Counter("aab"), collections.OrderedDict(b=1, a=2), collections.deque([1, 2], 3), range(1, 9, 2),
        ..., NotImplemented, 10**5000, -(10**400), decimal.Decimal("NaN"), fractions.Fraction(1, 3), bytearray(b"ab"),
        datetime.time(1, 2, 3), "\ud800", [[]] * 3, {}.keys(), {1: 2}.keys(), {1: 2}.items(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_of_the_library_keep_their_type(inside: Responder, value: Any) -> None:
    arrived = read_answer(f'{{"answer":{inside.write(value)}}}'.encode(), refuse_handle)["answer"]
    assert type(arrived) is type(value)
    assert arrived == value or value != value


def test_a_subclass_is_sent_as_its_bare_data(inside: Responder) -> None:
    class Odd(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    class Listing(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter([5])

    assert inside.write(Odd(7)) == "7"
    assert inside.write(Listing([1, 2])) == "[1,2]"
    point = collections.namedtuple("point", "x y")(1, 2)
    arrived = read_answer(f'{{"answer":{inside.write(point)}}}'.encode(), refuse_handle)["answer"]
    assert (arrived, arrived.y) == ((1, 2), 2)


def test_what_is_no_data_becomes_a_handle_and_the_same_one_twice(inside: Responder) -> None:
    thing = object()
    first, second = inside.write([thing, thing]).strip("[]").split("},")
    assert first.rstrip("}") == second.rstrip("}")
    handles: list[tuple[int, str, str]] = []
    read_answer(f'{{"answer":{inside.write(thing)}}}'.encode(), lambda *handle: handles.append(handle))
    assert handles[0][1:] == ("object", "object")


FORGED = [
    "", "x", "[]", "5", '"answer"', '{"tuple":[1]}', '{"answer":{"set":[[1]]}}', '{"answer":{"dict":[[1]]}}',
    '{"answer":{"dict":[[[],1]]}}', '{"answer":{"int":"x"}}', '{"answer":{"int":' + '"' + "f" * (2 << 20) + '"}}',
    '{"answer":{"handle":[1]}}', '{"answer":{"handle":["1","object","x"]}}', '{"answer":{"handle":[1,2,"x"]}}',
    '{"answer":{"handle":[1,"object",2]}}', '{"answer":{"range":[0,1,0]}}',
    '{"answer":{"tuple":{"range":[0,1000000000000,1]}}}', '{"answer":{"Fraction":"1/0"}}', '{"answer":{"Decimal":"x"}}',
    '{"answer":{"date":[2020,13,1]}}', '{"answer":{"bytes":"zz"}}', '{"answer":{"constant":"exit"}}',
    '{"answer":{"namedtuple":[1,2]}}', '{"answer":{"deque":[{"range":[0,100000000000,1]},null]}}', "9" * 5000,
    '{"answer":' + "[" * 100_000, '{"answer":' + "[" * 100_000 + "]" * 100_000 + "}", "\x00", "{" * 1000,
]  # fmt: skip


@pytest.mark.parametrize("text", FORGED, ids=lambda text: text[:40])
def test_a_forged_answer_is_refused(text: str) -> None:
    with pytest.raises(Forged):
        read_answer(text.encode(), lambda number, what, name: None)


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_be_refused(body: bytes) -> None:
    with pytest.raises(Forged):
        read_answer(body, lambda number, what, name: None)


def test_fields_of_a_named_tuple_cannot_smuggle_code() -> None:
    body = json.dumps({"answer": {"namedtuple": ["P", ["x=print('no')", "class", "_y"], [1, 2, 3]]}})
    assert read_answer(body.encode(), refuse_handle)["answer"] == (1, 2, 3)


def test_an_object_without_a_tag_equals_nothing_within_data() -> None:
    (odd,) = read_answer(b'{"answer":[{"a":1}]}', refuse_handle)["answer"]
    assert isinstance(odd, Untagged)
    assert odd != {"a": 1}


def test_arguments_that_are_no_data_are_refused_and_not_guessed() -> None:
    class Mine:
        pass

    for value in (Mine(), Mine, [Mine()], {1: Mine()}, collections.namedtuple("p", "x")(1)):
        with pytest.raises(NotPlain):
            expression_of(value, refuse)
    nested: list[Any] = []
    for _ in range(200):
        nested = [nested]
    with pytest.raises(NotPlain, match="deeply"):
        expression_of(nested, refuse)


# ---------------------------------------------------------------- bounds


def nested(wrap: Any, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [lambda inner: [inner], lambda inner: (inner,), lambda inner: {0: inner}, lambda inner: frozenset([inner])],
    ids=["list", "tuple", "dict", "frozenset"],
)
def test_depth_is_counted_through_every_container(wrap: Any) -> None:
    assert expression_of(nested(wrap, MAX_DEPTH), refuse)
    with pytest.raises(NotPlain, match="nested too deeply"):
        expression_of(nested(wrap, MAX_DEPTH + 1), refuse)


def test_depth_is_counted_through_values_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MAX_DEPTH", 4)
    assert expression_of(nested(lambda inner: collections.deque([inner]), 2), refuse)
    with pytest.raises(NotPlain, match="nested too deeply"):
        expression_of(nested(lambda inner: collections.deque([inner]), 3), refuse)
    assert expression_of({(1,): [2]}, refuse)
    with pytest.raises(NotPlain, match="nested too deeply"):
        expression_of({((((1,),),),): 0}, refuse)


def test_integers_are_digits_while_they_are_short() -> None:
    for number in (0, -5, (1 << 1023) + 1, -(1 << 1023)):
        assert expression_of(number, refuse) == repr(number)
    for number in ((1 << 1024) + 1, -(1 << 1024) - 1):
        assert expression_of(number, refuse) == hex(number)


def test_what_is_built_in_goes_by_its_name_and_nothing_that_only_has_one(inside: Responder) -> None:
    for value in (int, len, ValueError):
        assert eval(expression_of(value, refuse), inside.environment) is value

    class int_(int): ...

    int_.__name__ = "int"
    for other in (int_, math.sqrt, type("len", (), {})):
        with pytest.raises(NotPlain):
            expression_of(other, refuse)


def test_moments_of_a_time_zone_are_no_plain_data() -> None:
    zone = datetime.UTC
    for value in (datetime.datetime(2020, 1, 1, tzinfo=zone), datetime.time(1, tzinfo=zone)):
        with pytest.raises(NotPlain):
            expression_of(value, refuse)


def answered(content: Any) -> Any:
    return read_answer(json.dumps({"answer": content}).encode(), refuse_handle)["answer"]


@pytest.mark.parametrize(
    ("name", "fields", "values", "is_named"),
    [
        ("P", ["x", "y"], [1, 2], True), ("P", ["x"], [1, 2], False), ("n" * 99, ["x"], [1], True),
        ("n" * 100, ["x"], [1], False), ("P", ["x" * 100], [1], False), ("P", ["a b"], [1], False),
        (5, ["x"], [1], False),
        ("P", [f"x{number}" for number in range(64)], [0] * 64, True),
        ("P", [f"x{number}" for number in range(65)], [0] * 65, False), ("P", ["class"], [1], False),
    ],
)  # fmt: skip
def test_named_tuple_has_names_only_where_a_program_could_have_given_them(
    name: Any, fields: list[str], values: list[int], is_named: bool
) -> None:
    found = answered({"namedtuple": [name, fields, values]})
    assert found == tuple(values)
    assert hasattr(found, "_fields") is is_named
    if is_named:
        assert (type(found).__name__, list(found._fields)) == (name, fields)


@pytest.mark.parametrize(
    "content",
    [{"handle": [True, "object", "x"]}, {"handle": [1, 2, "x"]}, {"handle": [1, "object", 3]},
     {"Decimal": [0, [1], 0]}, {"Decimal": 5}, {"Fraction": 5}, {"complex": {"range": [0, 2]}}, {"dict": {"a": 1}},
     {"keys": "ab"}, {"items": 5}, {"Counter": 5}, {"deque": [[1], "x"]}],
)  # fmt: skip
def test_content_of_another_kind_is_no_value(content: Any) -> None:
    with pytest.raises(Forged):
        answered(content)


def test_texts_and_integers_have_a_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MAX_INT_DIGITS", 4)
    assert answered({"int": "-fff"}) == -0xFFF
    assert answered({"Decimal": "1.25"}) == decimal.Decimal("1.25")
    assert answered({"Fraction": "5/12"}) == fractions.Fraction(5, 12)
    assert answered({"Fraction": "7"}) == 7
    for content in ({"int": "fffff"}, {"Decimal": "1.125"}, {"Fraction": "5/123"}):
        with pytest.raises(Forged):
            answered(content)


def test_only_types_are_built_in_values() -> None:
    assert answered({"builtin": "int"}) is int
    assert answered({"builtin": "eval"}) is NotImplemented
    assert answered({"builtin": "no_such"}) is NotImplemented


@pytest.mark.parametrize("text", ['{"other":1}', "{}", '{"answer":1,"tuple":[]}x', '{"handle":[1,"a","b"]}'])
def test_message_holds_an_answer_an_exception_or_a_call_back(text: str) -> None:
    with pytest.raises(Forged):
        read_answer(text.encode(), lambda number, what, name: None)
    for name in ("answer", "raised", "callback"):
        assert read_answer(json.dumps({name: 1, "more": 2}).encode(), refuse_handle) == {name: 1, "more": 2}


def test_object_with_a_tag_and_more_is_no_tagged_value() -> None:
    found = answered([{"tuple": [1], "more": 2}])
    assert isinstance(found[0], Untagged)
    assert found[0].fields == {"tuple": [1], "more": 2}
