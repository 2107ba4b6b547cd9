"""`train`, `evaluate` and `resume` start the right command, and refuse mistakes in the command line's words."""

from __future__ import annotations

import pytest
import run_zoo as zoo
from valid_config import SMALL, config_of

import areal_like
from areal_like.errors import UserError
from areal_like.import_check import USER_PATH
from controller.config.loading import load_config
from controller.config.problems import ConfigError
from controller.python_api import controller_process
from controller.python_api.jobs import override_text, plain_value
from rollout.workflow import SingleTurn


def test_path_goes_to_the_command_line_with_the_overrides(started):
    run = areal_like.train("quickstart", num_steps=3, trainer__optimizer__lr=1e-5, **{"data.eval.limit": 7})
    assert started[0].arguments == [
        "train", "quickstart", "num_steps=3", "trainer.optimizer.lr=1e-05", "data.eval.limit=7"
    ]  # fmt: skip
    assert run.status.state == "finished"


def test_overrides_mean_the_same_as_on_the_command_line():
    words = [override_text("trainer__optimizer__lr", 1e-5), override_text("data", {"train": {"path": "a: b.jsonl"}})]
    words += [override_text("data.eval", None), override_text("eval.every_steps", 0)]
    words += [override_text("name", "übung # 1")]
    words += [override_text("sampling", {"max_new_tokens": 64, "temperature": 0.5, "stop_token_ids": (1, 2)})]
    config = load_config("quickstart", words).config
    assert config.trainer.optimizer.lr == 1e-5
    assert config.data.train.path == "a: b.jsonl"
    assert config.data.eval is None
    assert config.sampling.temperature == 0.5
    assert config.sampling.stop_token_ids == (1, 2)
    assert config.name == "übung # 1"


@pytest.mark.parametrize("make", [lambda data: data, lambda data: load_config("quickstart").config])
def test_dict_and_config_object_are_passed_on_whole(started, make):
    config = make(config_of())
    areal_like.train(config, num_steps=3)
    [call] = started
    assert call.arguments == ["train", controller_process.CONFIG, "num_steps=3"]
    expected = config if isinstance(config, dict) else config.model_dump(mode="json")
    assert call.data == expected


def test_callers_dict_is_not_changed(started):
    config = config_of()
    areal_like.train(config, num_steps=3)
    assert config == config_of()
    assert started[0].data == config_of()


def test_evaluate_starts_eval(started):
    areal_like.evaluate("quickstart", num_steps=3)
    assert started[0].arguments[0] == "eval"


def test_resume_takes_a_folder_a_name_or_a_run(started, tmp_path):
    folder = zoo.make_run(tmp_path / "runs", "stopped")
    for run in (folder.root, "stopped", areal_like.Run(folder.root)):
        areal_like.resume(run, accept_loss=True)
    assert [call.arguments for call in started] == [["resume", str(folder.root), "--accept-loss"]] * 3


def test_resume_of_a_run_in_progress_is_refused(started, tmp_path):
    folder = zoo.make_run(tmp_path / "runs", "running")
    with pytest.raises(UserError, match="still in progress"):
        areal_like.resume(folder.root)
    assert not started


def test_mistakes_are_raised_with_all_problems_before_anything_starts(started):
    with pytest.raises(ConfigError) as of_command:
        load_config("quickstart", ["num_stepps=3", "group_size=-1"])
    with pytest.raises(areal_like.ConfigError) as of_api:
        areal_like.train("quickstart", num_stepps=3, group_size=-1)
    assert str(of_api.value) == str(of_command.value)
    with pytest.raises(areal_like.ConfigError, match=r"config: .*`?num_stepps"):
        areal_like.train({**config_of(), "num_stepps": 3})
    assert not started


def test_functions_and_classes_become_import_paths():
    assert plain_value({"workflow": SingleTurn}, "rollout") == {"workflow": "rollout.workflow:SingleTurn"}


@pytest.mark.parametrize(("value", "words"), [(object(), "value of type object"), (float("nan"), "finite")])
def test_values_that_no_file_could_hold_are_refused_with_their_key(value, words):
    with pytest.raises(UserError, match=rf"^trainer\.optimizer\.lr.*{words}"):
        override_text("trainer__optimizer__lr", value)


def test_call_while_a_worker_imports_the_script_says_what_to_write(started, monkeypatch, tmp_path):
    monkeypatch.setenv(USER_PATH, str(tmp_path))
    with pytest.raises(UserError, match='if __name__ == "__main__"'):
        areal_like.train("quickstart", **dict(word.split("=") for word in SMALL))
    assert not started
