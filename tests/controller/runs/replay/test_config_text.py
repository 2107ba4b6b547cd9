"""Claims about what a configuration for others leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.runs.replay.config_text import config_text, portable
from trainer.config import TrainerSettings


def test_secrets_are_left_out_and_everything_else_stays(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {path: m/small}\nsampling: {max_new_tokens: 5, stop_token_ids: [1]}\n"
        "tools: [{api_key: abc, password: xyz, auth_token: t}]\nuri: https://me:pw@host/x\n"
    )
    text = config_text(file)
    for secret in ("abc", "xyz", "auth_token: t\n", "me:pw"):
        assert secret not in text
    for kept in ("path: m/small", "max_new_tokens: 5", "- 1", "@host/x"):
        assert kept in text


@pytest.mark.parametrize("value", [
    {"Authorization": "hidden"}, {"x-api-key": "hidden"}, {"apiKey": "hidden"}, {"OPENAI_API_KEY": "hidden"},
    {"api_keys": ["hidden"]}, {"credentials": {"user": "hidden"}}, "https://host/v1?page=2&access_token=hidden",
    ["Authorization: Bearer hidden-and-long-enough"], "--password=hidden", "HF_TOKEN=hidden",
    "/hidden", "~/hidden/models", "~hidden/x", {"/hidden": 1}, "-v /hidden/a:/b", "--data=/hidden/a", "file:///hidden",
    "data:/hidden/a", ["/a", ["/hidden"]],
])  # fmt: skip
def test_secrets_and_absolute_paths_are_left_out_in_every_usual_form(value: object) -> None:
    assert "hidden" not in str(portable(value))


@pytest.mark.parametrize("value", [
    "https://host:8000/v1/models?page=2", "org/model", "./data/rows.jsonl", "<think>a</think>", "1/2", "a / b",
    "trainer.losses:ppo", "a basic question about /", {"stop_token": 7, "num_tokens": [1, 2], "monkey": "a"}, None, 1.5,
])  # fmt: skip
def test_other_text_and_numbers_stay(value: object) -> None:
    assert portable(value) == value


def test_defaults_of_a_trainer_stay() -> None:
    settings = TrainerSettings().model_dump(mode="json")
    assert portable(settings) == settings


def test_file_that_is_not_yaml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("a: [")
    with pytest.raises(ValueError, match="expected"):
        config_text(file)
