"""The notation of tool calls is known before a run starts, where the tokenizer is here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_like.config import BUILT_IN_CHAT_TOKENIZERS, BUILT_IN_TOKENIZERS
from controller.config.run_config import RunConfig
from controller.preflight.chat_format import problems_of
from rollout.chat.formats import find_format
from trainer.model.tokenizers import build_tokenizer

HERMES = '<tool_call>{"name": , "arguments": }</tool_call>'


def config_of(folder: Path, workflow: str = "tools", **options: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"init": {"model_type": "qwen3"}, "tokenizer": str(folder)},
            "data": {"train": {"generator": "running_sum"}},
            "reward": {"scorers": [{"kind": "math"}], "environment": {"kind": "tools"}},
            "rollout": {"workflow": workflow, "workflow_options": options},
        }
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "format of tool calls in the tokenizer's chat template is unknown"),
        ({"format": "hermess"}, "there is no chat format `hermess`"),
    ],
)
def test_template_without_known_calls_and_a_wrong_name_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (problem,) = problems_of(config_of(tmp_path, **options))
    assert problem.keys == ("rollout.workflow_options.format",)
    assert words in problem.what


def test_tokenizer_without_a_template_is_refused_even_where_the_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{damaged")
    (problem,) = problems_of(config_of(tmp_path, format="hermes"))
    assert "no chat template" in problem.what


@pytest.mark.parametrize("tokenizer", sorted(set(BUILT_IN_TOKENIZERS) - set(BUILT_IN_CHAT_TOKENIZERS)))
@pytest.mark.parametrize("options", [{}, {"format": "hermes"}])
def test_built_in_tokenizer_has_no_template_and_is_refused(tokenizer: str, options: dict[str, Any]) -> None:
    (problem,) = problems_of(config_of(Path(tokenizer), **options))
    assert problem.keys == ("rollout.workflow_options.format",)
    assert problem.what == f"{tokenizer}: the tokenizer has no chat template"
    assert problem.remedy == "set model.tokenizer to a tokenizer with a chat template"
    assert not list(problems_of(config_of(Path(tokenizer), "single_turn")))


def test_agents_need_a_template_in_whatever_notation(tmp_path: Path) -> None:
    (problem,) = problems_of(config_of(Path("bytes"), "agent", command=["true"]))
    assert problem.keys == ("model.tokenizer",)
    assert "bytes has no chat template" in problem.what
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert not list(problems_of(config_of(tmp_path, "agent", command=["true"])))


@pytest.mark.parametrize("workflow", ["agent", "tools", "traffic"])
def test_built_in_tokenizers_for_chats_suit_agents_and_tools(workflow: str) -> None:
    assert not list(problems_of(config_of(Path("chat:tool_sum"), workflow)))


def test_built_in_tokenizers_have_a_template_in_a_known_format_or_none() -> None:
    for name in BUILT_IN_TOKENIZERS:
        template = build_tokenizer(name, None).chat_template
        assert (template is not None) == (name in BUILT_IN_CHAT_TOKENIZERS)
        assert template is None or find_format(template, where="x").name == "hermes"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("chat_template.jinja", HERMES),
        ("tokenizer_config.json", json.dumps({"chat_template": HERMES})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "tool_use", "template": HERMES}]})),
    ],
)
def test_template_is_found_wherever_a_tokenizer_keeps_it(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    assert not list(problems_of(config_of(tmp_path)))


def test_other_workflows_need_no_notation(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert not list(problems_of(config_of(tmp_path, "single_turn")))
