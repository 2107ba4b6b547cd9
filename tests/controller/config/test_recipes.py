"""Shipped recipes as a user validates them, and scorers that cannot work here: one clear error, before any start."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from ecosystem import interpreter_of

from controller.cli.main import main
from controller.config.loading import SHIPPED, load_config, shipped_configs, shipped_offline_configs
from controller.launch.choice import Survey
from controller.preflight import preflight


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "2+2?", "answer": "4"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = "name: tiny\nmodel: {init: {model_type: qwen3}, tokenizer: bytes}\ndata: {train: {path: rows.jsonl}}\n"
    (tmp_path / "tiny.yaml").write_text(config)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "held_out"), [("code_8b_8gpu", "code/humaneval.jsonl"), ("code_tiny", "code/mbpp_nontest.jsonl")]
)
def test_the_recipes_for_programs_are_valid(name: str, held_out: str, published: Callable[[str], Path]) -> None:
    rows = [f"data.train.path={published('code/mbpp_nontest.jsonl')}", f"data.eval.path={published(held_out)}"]
    assert main(["validate", name, *rows]) == 0


@pytest.mark.processes
def test_the_recipe_for_own_rows_and_an_own_reward_is_valid_in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SHIPPED.parent)
    assert main(["validate", "own_data"]) == 0


@pytest.mark.processes
@pytest.mark.parametrize("name", ["agent_code_8b_8gpu", "agent_search_8b_8gpu"])
def test_the_recipes_for_agents_are_valid_in_a_checkout_and_labelled_as_never_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "rows.jsonl").write_text('{"text": "Add.", "question": "?", "test_list": ["assert f(1)"]}\n')
    monkeypatch.chdir(SHIPPED.parent)
    assert main(["validate", name, f"data.train.path={path}", f"data.eval.path={path}"]) == 0
    assert "# Not run on a GPU, nor otherwise." in (SHIPPED / f"{name}.yaml").read_text()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["reasoning_gym_8b_8gpu", "reasoning_gym_tiny"])
def test_the_recipes_for_reasoning_gym_are_valid(name: str) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `reasoning-gym` is not installed")
    assert main(["validate", name, "data.train.limit=20", "data.eval.limit=5"]) == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("textarena_tiny", "textarena"), ("gymnasium_tiny", "gymnasium"), ("openenv_tiny", "aiohttp"),
        ("reasoning_gym_turns_tiny", "reasoning_gym"),
    ],
)  # fmt: skip
def test_the_configs_for_environments_of_other_packages_are_valid(name: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    assert main(["validate", name, "data.train.limit=20", "data.eval.limit=5"]) == 0


@pytest.mark.processes
def test_the_config_for_verifiers_is_valid_with_an_interpreter_that_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    python = interpreter_of("verifiers-0.1")
    assert main(["validate", "verifiers_tiny", f"rollout.workflow_options.python={python}"]) == 0
    assert main(["validate", "verifiers_tiny"]) == 2
    assert "rollout.workflow_options.python: `verifiers`: there is no program" in "".join(capsys.readouterr())


NAMED_ABOVE = {
    "code_8b_8gpu", "code_tiny", "own_data", "agent_code_8b_8gpu", "agent_search_8b_8gpu", "reasoning_gym_8b_8gpu",
    "reasoning_gym_tiny", "textarena_tiny", "gymnasium_tiny", "openenv_tiny", "reasoning_gym_turns_tiny",
    "verifiers_tiny",
}  # fmt: skip
ROW = {
    "prompt": "What is 2 + 2?", "problem": "What is 2 + 2?", "question": "What is 2 + 2?", "answer": "#### 4",
    "solution": "\\boxed{4}", "tests": ["assert f(1) == 2"], "test_list": ["assert f(1) == 2"],
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(set(shipped_configs()) - NAMED_ABOVE))
def test_every_other_shipped_config_is_valid_with_rows_of_its_columns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray is not asked for its nodes, and a model of the hub need not be here."""
    (path := tmp_path / "stub.jsonl").write_text(f"{json.dumps(ROW)}\n" * 200)
    monkeypatch.chdir(SHIPPED.parent)
    monkeypatch.setattr("controller.preflight.preflight.survey", lambda config: Survey())
    config = load_config(name).config
    sources = {"data.train": config.data.train, "data.eval": config.data.eval}
    rows = [f"{key}.path={path}" for key, source in sources.items() if source is not None and source.path]
    found = preflight.look(load_config(name, [*rows, f"runs_dir={tmp_path}/runs"]).config, "validate")
    assert [str(problem) for problem in found.problems] == []


@pytest.mark.processes
@pytest.mark.parametrize("name", shipped_offline_configs())
def test_the_shipped_configs_for_training_from_files_are_valid(name: str) -> None:
    assert main(["validate", name]) == 0


JUDGE = "base_url: 'http://127.0.0.1:1/v1', model: m"


@pytest.mark.parametrize(
    ("scorer", "words"),
    [
        ("{kind: llm_judge}", "scorers.0.options.base_url: Field required"),
        (f"{{kind: llm_judge, options: {{{JUDGE}}}}}", "set exactly one of rubric and rubric_file"),
        (f"{{kind: llm_judge, options: {{{JUDGE}, rubric: 'good?'}}}}", "does not contain the answer"),
        (f"{{kind: llm_judge, options: {{{JUDGE}, rubric: '{{{{ response'}}}}", "is not a valid Jinja template"),
        (f"{{kind: llm_judge, options: {{{JUDGE}, rubric_file: no.txt}}}}", "rubric_file no.txt cannot be read"),
        (f"{{kind: llm_judge, options: {{{JUDGE}, rubrik: x}}}}", "did you mean rubric"),
        ("{kind: http, options: {url: 'http://h', key_env: SURELY_NOT_SET}}", "SURELY_NOT_SET contains no key"),
        ("{kind: http, options: {url: 'http://h', total_timeout_s: 60}}", "is more than reward.timeout_s"),
        ("{kind: http, options: {url: 'nowhere'}}", "is not a valid URL"),
        ("{kind: reward_model, options: {path: /nowhere/model}}", "there is no folder /nowhere/model"),
        ("{kind: reward_model, options: {path: .}}", "no config.json"),
        ("{kind: overlong, options: {max_tokens: 10, soft_tokens: 20}}", "must not be greater than max_tokens"),
        ("{kind: overlong, options: {max_tokens: 9000, soft_tokens: 20}}", "the length penalty begins at 8980 tokens"),
        ("{kind: length}", "checks nothing"),
        ("{kind: math, clip: {min: 1, max: 0}}", "must be less than max"),
        ("{kind: math, gate: {at_most: 1}}", "did you mean reward.scorers.0.gate.at_least"),
    ],
)
def test_a_scorer_that_cannot_work_is_one_clear_error(
    scorer: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "tiny.yaml", f"reward.scorers=[{scorer}]"]) == 2
    printed = "".join(capsys.readouterr())
    assert words in printed, printed
    assert "Traceback" not in printed


def test_a_server_where_nobody_listens_stops_a_start_and_is_a_remark_of_validate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # taken, and nobody listens
        port = taken.getsockname()[1]
        scorer = f"reward.scorers=[{{kind: http, options: {{url: 'http://127.0.0.1:{port}/score'}}}}]"
        assert main(["validate", "tiny.yaml", scorer]) == 0
        assert f"reward.scorers.0.options.url: cannot connect to 127.0.0.1:{port}" in "".join(capsys.readouterr())
        assert main(["train", "tiny.yaml", scorer, "runs_dir=runs"]) == 2
        assert f"cannot connect to 127.0.0.1:{port}" in "".join(capsys.readouterr())


def test_a_task_that_is_none_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `reasoning-gym` is not installed")
    assert main(["validate", "reasoning_gym_tiny", "data.train.options={tasks: {chain_summ: null}}"]) == 2
    assert "did you mean chain_sum" in "".join(capsys.readouterr())


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert main(["validate", "reasoning_gym_tiny"]) == 2
    printed = "".join(capsys.readouterr())
    assert "the package reasoning-gym is not installed" in printed
    assert "areal-like[reasoning-gym]" in printed
