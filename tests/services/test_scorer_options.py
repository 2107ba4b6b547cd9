"""Claims about options of scorers: what is meant where one is left out, and which values are taken."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from areal_like.external.settings import EndpointOptions
from areal_like.settings import Settings
from services.reward.scorer_options import ALL_RULES
from services.reward.scorer_registry import SCORERS

NEEDED: dict[str, dict[str, Any]] = {
    "http": {"url": "http://h/score"},
    "llm_judge": {"base_url": "http://h/v1", "model": "m", "rubric": "{{ response }}"},
    "overlong": {"max_tokens": 100, "soft_tokens": 10}, "length": {"min_tokens": 1}, "reward_model": {"path": "m"},
    "format": {"must_stop": True},
}  # fmt: skip


def options(kind: str, **values: Any) -> Any:
    return SCORERS[kind].options.model_validate({**NEEDED.get(kind, {}), **values})


ENDPOINT = {
    "total_timeout_s": 8.0, "attempt_timeout_s": None, "retries": 3, "backoff_s": 0.2, "key_env": None,
    "key_file": None, "max_reply_kb": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("math", {"gold_field": None, "rules": ALL_RULES, "pattern": None, "must_stop": False, "float_digits": 6,
                  "max_response_chars": 50_000, "max_answer_chars": 400}),
        ("format", {"regex": None, "must_contain": (), "must_stop": True}),
        ("running_sum", {}),
        ("http", {**ENDPOINT, "url": "http://h/score", "columns": None, "headers": {}, "is_deterministic": True}),
        ("llm_judge", {**ENDPOINT, "base_url": "http://h/v1", "model": "m", "rubric": "{{ response }}",
                       "rubric_file": None,
                       "system": None, "parse": "json", "score_key": "score", "min_score": 0.0, "max_score": 10.0,
                       "score_regex": r"(?i)score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)", "correct_at": None,
                       "temperature": 0.0, "max_tokens": 512, "extra_body": {}, "max_response_chars": 50_000,
                       "max_tokens_key": "max_tokens", "record": "reuse", "records": None, "price_in": 0.0,
                       "price_out": 0.0, "max_cost": None, "max_tokens_total": None, "on_exhausted": "end"}),
        ("overlong", {"max_tokens": 100, "soft_tokens": 10, "penalty": 1.0, "cut_is_overlong": False}),
        ("length", {"min_tokens": 1, "max_tokens": None, "margin_tokens": 0}),
        ("reasoning_gym", {"extract": "tag", "must_stop": False, "max_answer_chars": 4000}),
        ("reward_model", {"path": "m", "template": None, "label": None, "output": "logit", "step_separator": None,
                          "reduce": "min", "max_steps": 48, "max_tokens": 4096, "on_long": "cut", "device": "cpu",
                          "dtype": "float32", "threads": 1, "max_batch": 16, "socket": None}),
    ],
)  # fmt: skip
def test_option_that_is_left_out_keeps_its_meaning_from_release_to_release(kind: str, wanted: dict[str, Any]) -> None:
    """A configuration must score the same after an update; another default is another scorer version."""
    made: Settings = options(kind)
    assert made.model_dump() == wanted
    assert all(getattr(made, name) == value for name, value in wanted.items())


def test_scorer_leaves_room_for_what_an_answer_takes_beyond_its_time() -> None:
    assert EndpointOptions.ROOM_S == 0.5


@pytest.mark.parametrize(
    ("kind", "option", "lowest", "highest"),
    [
        ("math", "float_digits", 1, 15), ("math", "max_response_chars", 1, None), ("math", "max_answer_chars", 1, None),
        ("http", "retries", 0, None), ("http", "max_reply_kb", 1, None), ("llm_judge", "max_tokens", 1, None),
        ("llm_judge", "max_response_chars", 1, None), ("length", "margin_tokens", 0, None),
        ("length", "max_tokens", 1, None),
        ("overlong", "soft_tokens", 1, 100), ("reasoning_gym", "max_answer_chars", 1, None),
        ("reward_model", "max_steps", 1, 60), ("reward_model", "max_tokens", 1, None),
        ("reward_model", "threads", 1, None),
        ("reward_model", "max_batch", 1, None), ("reward_model", "label", 0, None),
    ],
)  # fmt: skip
def test_counts_have_a_lowest_and_a_highest_value(kind: str, option: str, lowest: int, highest: int | None) -> None:
    assert getattr(options(kind, **{option: lowest}), option) == lowest
    with pytest.raises(ValidationError):
        options(kind, **{option: lowest - 1})
    if highest is not None:
        assert getattr(options(kind, **{option: highest}), option) == highest
    with pytest.raises(ValidationError):
        options(kind, **{option: 10**18 if highest is None else highest + 1})


@pytest.mark.parametrize(
    ("kind", "option"), [("http", "total_timeout_s"), ("http", "backoff_s"), ("overlong", "penalty")]
)
def test_times_and_weights_are_above_zero(kind: str, option: str) -> None:
    assert getattr(options(kind, **{option: 0.001}), option) == 0.001
    for value in (0, -1):
        with pytest.raises(ValidationError):
            options(kind, **{option: value})


def test_temperature_may_be_zero_and_not_below() -> None:
    assert options("llm_judge", temperature=0).temperature == 0
    with pytest.raises(ValidationError):
        options("llm_judge", temperature=-0.1)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("math", {"rules": []}), ("math", {"rules": ["boxed"], "pattern": "x"}), ("math", {"rules": ["pattern"]}),
        ("math", {"rules": ["pattern"], "pattern": "("}), ("format", {"must_stop": False}), ("format", {"regex": "("}),
        ("llm_judge", {"model": ""}), ("llm_judge", {"score_key": ""}), ("llm_judge", {"rubric_file": "r"}),
        ("llm_judge", {"score_regex": "(a)(b)"}), ("llm_judge", {"min_score": 10.0}),
        ("llm_judge", {"correct_at": 0.0}),
        ("llm_judge", {"correct_at": 10.5}), ("llm_judge", {"extra_body": {"n": 2}}),
        ("llm_judge", {"extra_body": {"stream": True}}), ("overlong", {"soft_tokens": 101}),
        ("length", {"min_tokens": 0}), ("length", {"min_tokens": 5, "max_tokens": 4}), ("reward_model", {"path": ""}),
        ("reward_model", {"step_separator": ""}), ("reward_model", {"device": "cuda:x"}),
        ("reward_model", {"device": "gpu"}),
        ("reward_model", {"step_separator": ";", "reduce": "prod"}), ("http", {"url": "http://h:0/x"}),
        ("http", {"url": "http:///x"}), ("http", {"url": "http://:p@h/x"}), ("http", {"url": "http://u@h/x"}),
        ("http", {"headers": {"Cookie": "x"}}), ("http", {"headers": {"X-API-Key": "x"}}),
        ("http", {"headers": {"a b": "x"}}),
        ("http", {"headers": {"a": "é"}}), ("http", {"headers": {"a": "x\ny"}}), ("running_sum", {"x": 1}),
    ],
)  # fmt: skip
def test_options_that_contradict_themselves_are_refused(kind: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        options(kind, **values)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("math", {"rules": ["pattern", "boxed"], "pattern": "<a>(.*?)</a>"}),
        ("format", {"must_stop": False, "regex": "x"}),
        ("format", {"must_stop": False, "must_contain": ["x"]}), ("llm_judge", {"correct_at": 10.0}),
        ("llm_judge", {"correct_at": 0.1}), ("llm_judge", {"rubric": None, "rubric_file": "r"}),
        ("llm_judge", {"extra_body": {"seed": 3}}), ("overlong", {"soft_tokens": 100}),
        ("length", {"min_tokens": 0, "max_tokens": 4}), ("length", {"min_tokens": 4, "max_tokens": 4}),
        ("reward_model", {"device": "cuda:1"}),
        ("reward_model", {"step_separator": ";", "reduce": "prod", "output": "probability"}),
        ("reward_model", {"reduce": "prod"}), ("http", {"url": "https://h:8443/x"}),
        ("http", {"headers": {"X-Team": "a b"}}),
    ],
)  # fmt: skip
def test_options_that_fit_each_other_are_taken(kind: str, values: dict[str, Any]) -> None:
    options(kind, **values)


def test_address_of_a_judge_is_taken_without_its_last_slash() -> None:
    assert options("llm_judge", base_url="http://h/v1//").base_url == "http://h/v1"
