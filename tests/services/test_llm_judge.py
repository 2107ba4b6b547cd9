"""Scorer `llm_judge` against a real OpenAI-like server on loopback whose judge says odd things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from odd_server import Asked, OddServer, chat, reply

from areal_like.errors import UserError
from services.reward.composition import WeightedSum
from services.reward.config import ScorerSettings
from services.reward.job import Job, Outcome
from services.reward.make_scorer import make_scorer

SERVERS: list[OddServer] = []
RUBRIC = (
    "Question: {{ prompt }}\nRight: {{ row.answer }}\nAnswer: {{ response }}\nReply with a JSON object: score, 0-10."
)


@pytest.fixture(autouse=True)
def servers_end() -> Iterator[None]:
    yield
    while SERVERS:
        SERVERS.pop().close()


def served(behave: Callable[[int, BaseHTTPRequestHandler, Asked], None]) -> OddServer:
    SERVERS.append(OddServer(behave))
    return SERVERS[-1]


def says(text: str | None, finish_reason: str = "stop") -> OddServer:
    return served(lambda n, h, asked: reply(h, chat(text, finish_reason)))


def settings_of(url: str, **options: Any) -> ScorerSettings:
    options = {"base_url": f"{url}/v1/", "model": "judge-1", "rubric": RUBRIC, "backoff_s": 0.01, **options}
    return ScorerSettings(kind="llm_judge", options={key: value for key, value in options.items() if value is not None})


def score(settings: ScorerSettings, response: str = "an answer", **row: Any) -> Outcome:
    row = row or {"prompt": "2+2?", "answer": "4"}
    job = Job(job_id=1, scorer="", row=row, response=response, finish_reason="stop", num_tokens=3)
    return WeightedSum.from_settings((settings,)).score(job, lambda name: None)


def test_the_rubric_is_filled_in_and_asked_at_temperature_0() -> None:
    server = says('{"score": 7}')
    outcome = score(settings_of(server.url, system="You are fair.", extra_body={"seed": 3}))
    assert outcome.value == 0.7
    assert outcome.components == {"llm_judge": 0.7, "llm_judge.raw": 7.0}
    (asked,) = server.asked
    assert asked.pop("messages") == [
        {"role": "system", "content": "You are fair."},
        {
            "role": "user",
            "content": "Question: 2+2?\nRight: 4\nAnswer: an answer\nReply with a JSON object: score, 0-10.",
        },
    ]
    assert asked == {"model": "judge-1", "temperature": 0.0, "max_tokens": 512, "seed": 3}


def test_an_answer_that_looks_like_a_template_is_data() -> None:
    server = says('{"score": 1}')
    score(settings_of(server.url), "{{ row.answer }} {% for %}")
    assert "Answer: {{ row.answer }} {% for %}" in server.asked[0]["messages"][0]["content"]


def test_only_the_end_of_a_long_answer_is_shown() -> None:
    server = says('{"score": 1}')
    score(settings_of(server.url, max_response_chars=5), "x" * 100 + "12345")
    assert "Answer: 12345\n" in server.asked[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ('{"score": 10}', 1.0),
        ('{"score": "2.5"}', 0.25),
        ('```json\n{"reason": "so {so}", "score": 4, "parts": {"style": 1}}\n```', 0.4),
        ('<think>maybe {"score": 9}</think>\n{"score": 3}', 0.3),
        ('{"score": 9} no, wait: {"score": 2}', 0.2),
        ('{"score": 0} {"other": 1}', 0.0),
    ],
)
def test_the_last_json_object_with_the_key_counts(said: str, value: float) -> None:
    assert score(settings_of(says(said).url)).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("said", "value"), [("Score: 7", 0.7), ("score = **3.5**", 0.35), ("Score: 1 ... final score: 9.", 0.9)]
)
def test_the_last_match_of_the_regex_counts(said: str, value: float) -> None:
    assert score(settings_of(says(said).url, parse="regex")).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("It is good.", "no JSON object with `score`: 'It is good.'"),
        ('{"score": "high"}', "no JSON object with `score`"),
        ('{"score": true}', "no JSON object with `score`"),
        ('{"score": null}', "no JSON object with `score`"),
        ('{"score": NaN}', "no JSON object with `score`"),
        ('{"score": 11}', "score 11 is not within 0 to 10"),
        ('{"score": -1}', "score -1 is not within 0 to 10"),
        ('{"score": 5', "no JSON object"),
        ("", "reply is empty"),
        (None, "reply is empty"),
        ("<think>long thoughts</think>", "reply is empty"),
        ("{" * 5000, "no JSON object"),
    ],
)
def test_a_reply_without_a_score_is_invalid_and_no_zero(said: str | None, words: str) -> None:
    outcome = score(settings_of(says(said).url))
    assert (outcome.kind, outcome.value) == ("invalid", None)
    assert words in outcome.reason


def test_a_thought_cut_short_names_the_bound() -> None:
    assert "truncated at max_tokens 512" in score(settings_of(says(None, "length").url)).reason


@pytest.mark.parametrize("body", [b"[]", b'{"choices": []}', b'{"choices": [{"text": "x"}]}', b"not json", b"\xff"])
def test_what_is_no_chat_completion_is_invalid(body: bytes) -> None:
    server = served(lambda n, h, asked: reply(h, body))
    assert score(settings_of(server.url)).kind == "invalid"


def test_a_judge_that_is_busy_is_asked_again() -> None:
    server = served(lambda n, h, asked: reply(h, chat('{"score": 5}')) if n == 2 else reply(h, b"", 429))
    assert score(settings_of(server.url)).value == 0.5


def test_scores_of_another_range_become_0_to_1_and_may_mean_correct() -> None:
    settings = settings_of(says('{"score": 3}').url, min_score=1, max_score=5, correct_at=4)
    assert score(settings).components == {"llm_judge": 0.5, "llm_judge.raw": 3.0, "correct": 0.0}
    settings = settings_of(says('{"score": 4}').url, min_score=1, max_score=5, correct_at=4)
    assert score(settings).components["correct"] == 1.0


def test_a_row_without_what_the_rubric_names_is_invalid_and_nobody_is_asked() -> None:
    server = says('{"score": 5}')
    outcome = score(settings_of(server.url), prompt="2+2?")
    assert outcome.kind == "invalid"
    assert "lacks a field that the template uses" in outcome.reason
    assert "answer" in outcome.reason
    assert not server.asked


def test_a_conversation_is_shown_turn_by_turn() -> None:
    server = says('{"score": 5}')
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    score(settings_of(server.url), messages=turns, answer="4")
    assert "Question: system: be brief\n\nuser: 2+2?\n" in server.asked[0]["messages"][0]["content"]


def test_a_judge_that_samples_says_that_it_is_not_deterministic() -> None:
    assert make_scorer(settings_of("http://h")).is_deterministic  # type: ignore[attr-defined]
    assert not make_scorer(settings_of("http://h", temperature=0.5)).is_deterministic  # type: ignore[attr-defined]


def test_version_changes_with_the_rubric_in_a_file_and_not_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "sk-a")
    file = tmp_path / "rubric.txt"
    file.write_text("{{ response }} good?")
    settings = settings_of("http://h", rubric=None, rubric_file=str(file))
    first = make_scorer(settings).version
    assert make_scorer(settings_of("http://h", rubric="{{ response }} good?", key_env="A_KEY")).version == first
    file.write_text("{{ response }} bad?")
    assert make_scorer(settings).version != first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rubric": None}, "exactly one of rubric and rubric_file"),
        ({"rubric": "{{ response"}, "is not a valid Jinja template"),
        ({"rubric": "good?"}, "does not contain the answer"),
        (
            {"rubric": "{{ response }} {{ question }}"},
            "uses the unknown name `question`; the known names are answer, prompt, response, row",
        ),
        ({"rubric": None, "rubric_file": "/nowhere/rubric"}, "/nowhere/rubric cannot be read"),
        ({"score_regex": "("}, "not a valid regular expression"),
        ({"score_regex": "score"}, "one group"),
        ({"min_score": 5, "max_score": 5}, "must be less than max_score"),
        ({"correct_at": 11}, "correct_at"),
        ({"extra_body": {"temperature": 1}}, "extra_body must not contain `temperature`"),
        ({"base_url": "localhost:8000"}, "not a valid URL"),
        ({"key_env": "SURELY_NOT_SET"}, "contains no key"),
    ],
)
def test_what_cannot_work_is_reported_at_the_start(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_scorer(settings_of("http://h", **{"rubric": RUBRIC} | options))
    assert words in str(caught.value), str(caught.value)
