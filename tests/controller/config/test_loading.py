"""From YAML and overrides to a config, or to every problem at once."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from controller.config.loading import SHIPPED, LoadedConfig, find_config, load_config, shipped_configs
from controller.config.problems import ConfigError
from controller.config.yaml_document import parse_document, parse_value

MINIMAL = """\
model:
  init: {model_type: qwen3, max_position_embeddings: 4096}
  tokenizer: bytes
data:
  train: {generator: running_sum}
"""


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(MINIMAL)
    return Path("job.yaml")


def load(*overrides: str, name: str = "job.yaml") -> LoadedConfig:
    return load_config(name, overrides)


def problems(*overrides: str, name: str = "job.yaml") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, name=name)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-2.5E3", -2500.0),
        ("010", 10),
        ("1_000", 1000),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("null", None),
        ("", None),
        ("2026-11-20", "2026-11-20"),
        ("12:30", "12:30"),
        ("[1, 2e1]", [1, 20.0]),
        ("{a: {b: x}}", {"a": {"b": "x"}}),
        ("foo", "foo"),
        ("'1'", "1"),
        ("services.reward:f", "services.reward:f"),
        (".inf", math.inf),
    ],
)
def test_values_are_what_people_mean(text: str, value: Any) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.usefixtures("config_file")
class TestOverrides:
    def test_set_keys_at_any_depth(self) -> None:
        config = load("trainer.optimizer.lr=1e-4", "name=foo", "sampling.stop_token_ids=[1, 2]", "num_steps=1e2").config
        assert config.trainer.optimizer.lr == 1e-4
        assert config.name == "foo"
        assert config.sampling.stop_token_ids == (1, 2)
        assert config.num_steps == 100

    def test_reach_into_free_mappings_and_lists(self) -> None:
        loaded = load("model.init.hidden_size=64", "reward.scorers=[{kind: math}]", "reward.scorers.0.weight=0.5")
        assert loaded.config.model.init is not None
        assert loaded.config.model.init["hidden_size"] == 64
        assert loaded.config.reward.scorers[0].weight == 0.5

    def test_last_one_wins(self) -> None:
        assert load("seed=2", "seed=3").config.seed == 3

    def test_without_a_value_or_a_key_are_refused(self) -> None:
        assert len(problems("foo", "=3", "a..b=1", "seed={")) == 4

    def test_a_text_with_a_nul_is_refused(self) -> None:
        assert "NUL" in problems('runs_dir="a\\0b"')[0]

    def test_aliases_of_aliases_end_before_they_fill_the_memory(self) -> None:
        lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in pairwise("abcdefghi")]
        Path("job.yaml").write_text("\n".join(lines))
        with pytest.raises(UserError, match="more than 100,000 entries"):
            load()

    def test_of_an_entry_that_is_not_there_are_refused(self) -> None:
        for place in ("3", "1", "-1", "²"):
            for key in (place, f"{place}.weight"):
                assert f"no entry `{place}`" in problems("reward.scorers=[{kind: math}]", f"reward.scorers.{key}=1")[0]

    def test_below_a_plain_value_are_refused(self) -> None:
        assert "has no key `x`" in problems("seed=1", "seed.x=2")[0]

    def test_mode_replaces_the_files_bound_and_says_so(self) -> None:
        Path("job.yaml").write_text(MINIMAL + "staleness: {max_staleness: 3}\nrollout: {interruption: keep_kv}\n")
        loaded = load("mode=sync")
        assert loaded.config.staleness.max_staleness == 0
        assert "sets staleness.max_staleness to 0 instead of 3" in loaded.notes[0]
        loaded = load("mode=one_step_off")
        assert (loaded.config.staleness.max_staleness, loaded.config.rollout.interruption) == (1, "drain")

    def test_that_contradict_each_other_are_refused(self) -> None:
        assert "mode sync requires a staleness bound of 0" in problems("mode=sync", "staleness.max_staleness=3")[0]
        assert "are mutually exclusive" in problems("model.path=x", "model.init.model_type=qwen3")[0]
        assert "are mutually exclusive" in problems("data.train.path=x", "data.train.dataset=y")[0]

    def test_path_replaces_init_and_generator(self) -> None:
        loaded = load("model.path=some/folder", "data.train.path=rows.jsonl")
        assert loaded.config.model.init is None
        assert loaded.config.data.train.generator is None
        assert loaded.config.model.tokenizer == "from_model"
        assert len(loaded.notes) == 3

    def test_null_takes_an_optional_section_away(self) -> None:
        Path("job.yaml").write_text(MINIMAL + "  eval: {generator: running_sum}\n")
        assert load().config.data.eval is not None
        assert load("data.eval=null").config.data.eval is None


@pytest.mark.usefixtures("config_file")
class TestProblems:
    def test_all_are_reported_at_once_one_a_line(self) -> None:
        found = problems(
            "num_steps=ten", "trainer.optimizer.lr=-1", "staleness.max_staleness=-1", "mode=asink", "grup_size=3"
        )
        assert len(found) == 5
        assert all("command line" in line for line in found)
        text = "\n".join(found)
        assert "num_steps: the value must be a whole number, not `ten`" in text
        assert "trainer.optimizer.lr: the value must be at least 0, not -1" in text
        sentence = (
            "mode: the value must be one of `async` | `one_step_off` | `sync`, not `asink` -> did you mean `async`?"
        )
        assert sentence in text
        assert "grup_size: no such key -> did you mean group_size" in text

    @pytest.mark.parametrize(
        ("wrong", "right"),
        [
            ("lr=1", "trainer.optimizer.lr"),
            ("trainer.lr=1", "trainer.optimizer.lr"),
            ("trainer.optimzer.lr=1", "trainer.optimizer"),
            ("staleness.max_stalenes=1", "staleness.max_staleness"),
            ("rollout.engine.slots=4", "rollout.engine.num_slots"),
            ("max_staleness=4", "staleness.max_staleness"),
            ("temperature=1", "sampling.temperature"),
            ("learning_rate=1", "trainer.optimizer.lr"),
            ("max_new_token=5", "sampling.max_new_tokens"),
            ("data.train.file=x", "data.train."),
            ("model.attention=sdpa", "trainer.attention"),
        ],
    )
    def test_unknown_key_names_the_nearest_right_one(self, wrong: str, right: str) -> None:
        assert right in problems(wrong)[0].partition("->")[2]

    def test_removed_key_says_that_it_is_to_be_deleted(self) -> None:
        Path("job.yaml").write_text(MINIMAL + "launch:\n  curve: false\n")
        assert problems() == [
            "job.yaml:7: launch.curve: no such key -> remove this key: sockets are now always encrypted"
        ]

    def test_say_the_line_of_the_file(self) -> None:
        Path("job.yaml").write_text(
            MINIMAL + "trainer:\n  optimizer:\n    lr: fast\nreward:\n  scorers:\n    - {kid: 1}\n"
        )
        assert problems() == [
            "job.yaml:8: trainer.optimizer.lr: the value must be a number, not `fast`",
            "job.yaml:11: reward.scorers.0.kind: this key is required -> set this key: `math`, `code` or "
            "another of the built-in"
            " ones (docs/rewards.md), or your own `module:function`.",
            "job.yaml:11: reward.scorers.0.kid: no such key -> did you mean reward.scorers.0.kind?",
        ]

    def test_true_is_not_a_number(self) -> None:
        assert problems("num_steps=true") == ["command line: num_steps: the value must be a whole number, not true"]

    def test_temperature_zero_points_to_evaluation(self) -> None:
        assert "eval.temperature" in problems("sampling.temperature=0")[0]

    def test_of_combinations_are_found_together_with_wrong_values(self) -> None:
        found = problems("num_steps=ten", "trainer.mini_batches=1000")
        assert any("cannot be divided" in line for line in found)

    def test_of_combinations_with_a_wrong_value_are_not_made_up(self) -> None:
        assert len(problems("rollout.engine.max_context=many", "sampling.max_new_tokens=3000")) == 1

    def test_missing_section_is_named(self) -> None:
        Path("job.yaml").write_text("name: x\n")
        assert problems() == [
            "job.yaml: data: this key is required -> set this key: What the policy is trained and evaluated on."
        ]

    def test_section_given_as_a_value_lists_its_keys(self) -> None:
        assert "valid keys: max_staleness, on_stale" in problems("staleness=3")[0]

    def test_empty_section_means_its_defaults(self) -> None:
        Path("job.yaml").write_text(MINIMAL + "trainer:\nrollout:\n  engine:\n")
        assert load().config.trainer.mini_batches == 1


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "where", "words"),
        [
            ("a: 1\nb: [1\nc: 2\n", "f:3", "not valid YAML"),
            ("a:\n\t- b\n", "f:2", "spaces"),
            ("a: 1\nb: 2\na: 3\n", "f:3", "is set twice (first on line 1)"),
            ("", "f", "empty"),
            ("- 1\n", "f:1", "mapping"),
            ("a: !!python/object:os.system x\n", "f:1", "not valid"),
            ("a: &x [*x]\n", "f", "deep"),
            ("a: \x00\n", "f", "not valid"),
        ],
    )
    def test_syntax_errors_name_the_line(self, text: str, where: str, words: str) -> None:
        with pytest.raises(UserError) as caught:
            parse_document(text, "f")
        assert caught.value.where == where
        assert words in str(caught.value)

    def test_lines_of_nested_keys_are_known(self) -> None:
        document = parse_document("a:\n  b: [1,\n   {c: 2}]\n", "f")
        assert document.where("a.b.1.c") == "f:3"
        assert document.where("a.x.y") == "f:1"
        assert document.where("nothing") == "f"


class TestFindingTheFile:
    def test_shipped_configs_are_found_by_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert {"quickstart", "gsm8k_8b_8gpu", "gsm8k_tiny", "own_data"} <= set(shipped_configs())
        assert find_config("gsm8k_1.7b_1gpu").name == "gsm8k_1.7b_1gpu.yaml"
        for name in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml"):
            assert find_config(name).name == "quickstart.yaml"

    def test_rows_of_a_shipped_config_are_found_from_any_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        there = load_config("own_data").config.data.train.path
        assert there is not None
        assert Path(there) == SHIPPED / "own_data" / "train.jsonl"
        mine = tmp_path / "configs" / "own_data" / "train.jsonl"
        mine.parent.mkdir(parents=True)
        mine.write_text('{"prompt": "a", "answer": "b"}\n')
        assert load_config("own_data").config.data.train.path == "configs/own_data/train.jsonl"

    def test_rows_of_a_config_of_ones_own_are_looked_for_here_only(self, config_file: Path) -> None:
        rows = "data.train.path=configs/own_data/train.jsonl"
        assert load(rows).config.data.train.path == "configs/own_data/train.jsonl"

    def test_a_file_here_goes_before_a_shipped_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("quickstart.yaml").write_text(MINIMAL)
        assert find_config("quickstart.yaml").resolve().parent == tmp_path.resolve()

    def test_a_runs_folder_stands_for_its_config(self, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text(MINIMAL)
        assert find_config(str(tmp_path)) == tmp_path / "config.yaml"

    def test_a_missing_file_lists_what_there_is(self) -> None:
        with pytest.raises(UserError, match=r"did you mean .*quickstart.*shipped configs: .*gsm8k"):
            find_config("quickstrat")
        with pytest.raises(UserError, match="shipped configs"):
            find_config("/nowhere/at_all.yaml")

    def test_a_folder_or_a_binary_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"the folder contains no config\.yaml"):
            find_config(str(tmp_path))
        (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UserError, match="UTF-8"):
            load_config(str(tmp_path / "x.yaml"))


@pytest.mark.usefixtures("config_file")
class TestPlaces:
    @pytest.mark.parametrize("index", ["1", "2", "-1", "²", "9" * 20, "first"])
    def test_an_index_past_the_end_of_a_list_is_refused_in_words(self, index: str) -> None:
        Path("job.yaml").write_text(MINIMAL + "reward:\n  scorers:\n    - {kind: math}\n")
        assert problems(f"reward.scorers.{index}.weight=2") == [
            f"command line: reward.scorers.{index}.weight: the list has no entry `{index}`; its only entry is 0"
        ]
        assert load("reward.scorers.0.weight=2").config.reward.scorers[0].weight == 2

    def test_an_index_into_an_empty_list_is_refused_in_words(self) -> None:
        Path("job.yaml").write_text(MINIMAL + "reward:\n  scorers: []\n")
        assert "the list is empty" in problems("reward.scorers.0.weight=2")[0]

    @pytest.mark.parametrize("key", ["algorithm.gamma", "trainer.ppo.clip", "a.b.c.d", "warm_start.sft.steps"])
    def test_a_section_given_on_the_command_line_is_not_blamed_on_the_file(self, key: str) -> None:
        assert all(problem.startswith("command line: ") for problem in problems(f"{key}=1"))

    def test_a_wrong_key_of_the_file_keeps_its_line_next_to_overrides_of_its_section(self) -> None:
        Path("job.yaml").write_text(MINIMAL + "trainer:\n  ppo: 1\n")
        assert problems("trainer.ranks=1")[0].startswith("job.yaml:7: trainer.ppo: no such key")
