"""Claims about the benchmark of conversations over chat templates: it passes where the store is right, and sees when it
is not.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_like.prompts import PromptEncoder, TurnEnd
from benchmarks import folders, runs, transcripts
from benchmarks.panels import panels_of
from benchmarks.tables import markdown
from rollout.agent.session import AgentSession
from rollout.agent.store import TokenStore

ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}" + ASK
)
REASONING = "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
REASONS = CHATML.replace("{{ m.content or '' }}", REASONING + "{{ m.content or '' }}")
"""Reasoning is written for a last answer only."""
BEGINS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The next message's marker ends an answer, as in GLM's. Its markers are made, so they are not in the text."""
TAGS = "{# <|user|><|assistant|><|system|> #}"
PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}"


def fuzz(template: str, number: int = 30, name: str = "made") -> dict[str, Any]:
    return transcripts.fuzz(name, template, 0, number)


@pytest.mark.parametrize(
    ("template", "stops", "can_call"),
    [(CHATML, None, True), (transcripts.MISTRAL, None, True), (TAGS + BEGINS, ("<|user|>", "<|system|>"), False)],
    ids=["an end of its own", "trims answers", "the next message ends a turn"],
)
def test_no_answer_is_forked_changed_or_lost(
    template: str, stops: tuple[str, ...] | None, can_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stops:
        monkeypatch.setitem(transcripts.STOPS, "made", stops)
    row = fuzz(template)
    assert [row[name] for name in transcripts.FAULTS] == [0, 0, 0, 0, 0]
    assert row["conversations"] == row["chat"] + row["responses"] + row["messages"] == 30
    assert min(row["chat"], row["responses"], row["messages"], row["retries"]) > 3
    assert row["without_reasoning"] == 0, "the policy of these templates does not reason"
    assert row["continued"] > 60
    assert row["tokens"] > row["requests"]
    assert row["trajectories"] > 30, "branches and repeated requests have trajectories of their own"
    assert (row["calls"] > 10) == can_call
    assert 0 < row["truncated"] < row["requests"] / 4


def test_reasoning_that_the_template_leaves_out_begins_again_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = fuzz(REASONS, 20)
    assert [row[name] for name in transcripts.FAULTS] == [0, 0, 0, 0, 0]
    assert row["without_reasoning"] > 3
    assert row["continued"] > row["without_reasoning"]
    monkeypatch.setattr(TokenStore, "_is_left_out", lambda *_: True)
    assert fuzz(REASONS, 20)["false_forks"] > 0


def test_a_retry_that_samples_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentSession, "_known", lambda *_: None)
    row = fuzz(CHATML, 10)
    assert row["sampled_again"] == row["retries"] > 0


def test_conversations_depend_on_their_number_alone() -> None:
    first, second = fuzz(CHATML, 4), fuzz(CHATML, 4)
    first.pop("cpu_s"), second.pop("cpu_s")
    assert first == second
    assert transcripts.fuzz("made", CHATML, 4, 4)["tokens"] != first["tokens"]


def test_a_store_that_renders_again_has_false_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenStore, "_after", lambda *_: None)
    row = fuzz(CHATML, 5)
    assert row["false_forks"] == row["continued"] > 0


@pytest.mark.parametrize(
    "broken",
    [
        lambda end, whole: TurnEnd(end.mark, whole),
        lambda end, whole: TurnEnd(end.mark, end.tail.replace("E<|im_end|>", "<|im_end|>")),
        lambda end, whole: TurnEnd(end.mark, end.tail + " "),
    ],
    ids=["earlier messages again", "a message is cut", "after the beginning of an answer"],
)
def test_a_wrong_text_after_an_answer_is_seen(
    broken: Callable[[TurnEnd, str], TurnEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PromptEncoder.turn_end

    def turn_end(self: PromptEncoder, messages: Any, covered: int, stops: Any, tools: Any = ()) -> TurnEnd:
        return broken(right(self, messages, covered, stops, tools), self.chat_text(messages, tools=tools))

    monkeypatch.setattr(PromptEncoder, "turn_end", turn_end)
    row = fuzz(CHATML, 5)
    assert row["wrong_text"] > 0
    assert row["false_forks"] == 0


def test_a_lost_trajectory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TokenStore.trajectories
    monkeypatch.setattr(TokenStore, "trajectories", lambda self: right(self)[1:])
    assert fuzz(CHATML, 5)["lost"] == 5


def test_a_template_that_takes_no_texts_is_refused_in_a_sentence() -> None:
    row = fuzz(PARTS, 5)
    assert row == {"template": "made", "refused": row["refused"]}
    assert "rejected" in row["refused"] or "no text" in row["refused"]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with two templates to use, and two for training of which one was studied."""
    path = tmp_path / "trl.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (("a", CHATML), ("parts", PARTS), ("a_training", CHATML), ("qwen3_training", CHATML)):
            archive.writestr(f"trl/chat_templates/{name}.jinja", text)
        archive.writestr("trl/chat_templates/README.md", "")
    return path


def test_templates_for_training_are_left_out(wheel: Path, tmp_path: Path) -> None:
    assert list(transcripts.templates_of(wheel)) == ["a", "parts", "qwen3_training", "mistral_like"]
    with pytest.raises(SystemExit, match="is not a wheel"):
        transcripts.templates_of(tmp_path / "none.whl")
    with zipfile.ZipFile(tmp_path / "empty.whl", "w"):
        pass
    with pytest.raises(SystemExit, match="has no trl/chat_templates"):
        transcripts.templates_of(tmp_path / "empty.whl")


def call(monkeypatch: pytest.MonkeyPatch, *given: str) -> None:
    monkeypatch.setattr(sys, "argv", ["transcripts", *given])
    transcripts.main()


@pytest.mark.processes
def test_a_result_has_all_templates_and_the_exit_status_the_faults(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folders, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runs, "show", lambda *_: None)
    with pytest.raises(SystemExit, match=r"^0$"):
        call(monkeypatch, "--wheel", str(wheel), "--conversations", "8", "--processes", "1")
    result = json.loads((tmp_path / "results" / "transcripts.json").read_text())
    assert [row["template"] for row in result["rows"]] == ["a", "parts", "qwen3_training", "mistral_like"]
    assert result["total"]["conversations"] == 9, "as many as asked for, three with each template that is used"
    assert "all" in capsys.readouterr().out
    text = markdown("transcripts", result)
    assert "| all |  |  | 9 |" in text
    assert "Not used: `parts`: " in text
    (panel,) = panels_of("transcripts", result)
    assert len(panel.places) == 3
    result["total"]["changed"] = 1
    assert "| 0 | 1 | 0 | 0 | 0 |" in markdown("transcripts", result)
    for row in (result["total"], *result["rows"]):
        row.pop("sampled_again", None)
    assert "sampled again" not in markdown("transcripts", result), "results of earlier versions have no retries"


def test_unknown_templates_are_named(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, "--wheel", str(wheel), "--templates", "a,b")
    assert "no template b; known: a, parts, qwen3_training, mistral_like" in capsys.readouterr().err
