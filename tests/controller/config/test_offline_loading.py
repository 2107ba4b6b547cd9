"""Claims about configs of runs from files: recognised, checked as a whole, and valid where they are shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.errors import UserError
from controller.config.loading import SHIPPED, find_config, shipped_offline_configs
from controller.config.offline_loading import is_offline, is_offline_file, load_offline
from controller.config.problems import ConfigError

CONFIG = """\
model: {init: {model_type: qwen3}, tokenizer: bytes}
data:
  train: rows.jsonl
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "job.yaml").write_text(CONFIG)
    return str(tmp_path / "job.yaml")


@pytest.mark.parametrize("name", shipped_offline_configs())
def test_shipped_configs_from_files_are_valid_in_any_folder_and_named_as_their_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_offline(name)
    assert f"offline/{loaded.config.name}" == name
    assert Path(loaded.config.data.train).is_file()
    assert Path(loaded.config.data.eval or "").is_file()


def test_shipped_configs_from_files_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("offline/sft", "configs/offline/sft", "offline/sft.yaml"):
        assert find_config(name) == SHIPPED / "offline" / "sft.yaml"
    with pytest.raises(UserError, match="offline/sft"):
        find_config("offline/stf")


def test_a_path_of_rows_tells_the_two_kinds_of_config_apart(config: str) -> None:
    assert is_offline_file(config, [])
    assert not is_offline_file("quickstart", [])
    assert is_offline_file("quickstart", ["data={train: rows.jsonl}"])
    assert not is_offline({"data": None})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "trainer={ranks: 2, backend: torch}",
            "the backend torch supports one process, but trainer.ranks is 2 -> set trainer.",
        ),
        ("trainer.optimizer.learning_rate=1", "trainer.optimizer.learning_rate: no such key"),
        ("epochs=0", "epochs: the value must be greater than 0, not 0"),
        ("epochs=true", "epochs: the value must be a whole number, not true"),
        ("eval.every_steps=5", "eval.every_steps: there is no evaluation data -> set data.eval to a file"),
        ("model.tokenizer=from_model", "model.tokenizer: a model created from model.init has no tokenizer"),
        ("model.init=null", "neither model.path nor model.init is given"),
        ("dpo={loss: ipo, label_smoothing: 0.1}", "dpo.label_smoothing: this key applies only to the loss `sigmoid`"),
        (
            "data.prompt_template=hi",
            "data.prompt_template: the template does not contain {prompt} -> add {prompt} to the template",
        ),
        ("data.train=null", "data.train: the value must be text, not null"),
        (
            "trainer.lora={targets: []}",
            "trainer.lora.targets: the list contains no module, so nothing would be trained",
        ),
        ("trainer.lora={publish: adapter}", "trainer.lora.publish: no such key"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(config: str, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_offline(config, [override])
    assert words in str(refused.value)


def test_one_rank_may_name_its_backend(config: str) -> None:
    assert load_offline(config, ["trainer={ranks: 1, backend: torch}"]).config.trainer.backend == "torch"


def test_a_mistake_in_the_file_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(CONFIG + "trainer:\n  backend: torch\n  ranks: 2\n")
    with pytest.raises(ConfigError, match=r"job.yaml:6: trainer.ranks.*: the backend torch supports one process"):
        load_offline(str(tmp_path / "job.yaml"))


def test_an_override_replaces_what_the_file_says_instead(config: str) -> None:
    loaded = load_offline(config, ["model.path=/models/tiny"])
    assert loaded.config.model.init is None
    assert loaded.config.model.tokenizer == "from_model"
    assert any("replaces model.init" in note for note in loaded.notes)
