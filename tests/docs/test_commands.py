"""Every command of the README and the documentation is run, or is in a list with the reason and the test that runs it.

Commands run in this process, in a folder that has what the pages assume: rows, a config, a scorer, and a recorded run
under the names that the pages use. Of commands that train, sample or evaluate a model, the config is loaded with all
overrides.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import run_zoo as zoo
from odd_server import OddServer, chat, reply
from recorded_run import make_recorded_run
from shown_commands import DOCS, PAGES, README, REPOSITORY, Command, commands, texts

from controller.cli.arguments import make_parser
from controller.cli.main import main
from controller.config.loading import load_config
from controller.config.offline_loading import is_offline_file, load_offline
from controller.data.origins import record_data
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.seal import read_seal, write_seal

PREPARED = {
    "train": "e2e/test_main_job.py::test_quickstart_learns_to_add",
    "probe": "controller/probe/test_probe.py::test_shipped_config_is_probed_without_a_finding_and_leaves_nothing",
    "eval": "e2e/test_main_job.py::test_evaluating_the_final_policy_by_command_gives_the_same_accuracy",
    "sft": "e2e/test_offline.py::test_a_killed_and_resumed_run_ends_with_the_same_model",
    "dpo": "e2e/test_offline.py::test_a_killed_and_resumed_run_ends_with_the_same_model",
    "reward-model": "e2e/test_offline.py::test_a_killed_and_resumed_run_ends_with_the_same_model",
}
"""Commands whose configs are loaded here, and the test that runs one of them to its end."""
NOT_RUN: list[tuple[str, str, str]] = [
    ("make quickstart( .*)?", "installs packages and trains for minutes",
     "e2e/test_main_job.py::test_quickstart_learns_to_add"),
    ("make test", "is what runs this test", "docs/test_commands.py::test_what_make_builds_is_a_target"),
    ("areal-like init mine.yaml", "asks questions on a terminal",
     "controller/cli/test_init.py::test_questions_are_asked_again_until_the_answer_is_one"),
    ("areal-like (train|resume) quickstart --keep-alive", "stays until the run has ended",
     "e2e/test_keep_alive.py::test_run_whose_controller_is_killed_ends_without_anybody"),
    ("areal-like resume sft", "trains",
     "e2e/test_offline.py::test_a_killed_and_resumed_run_ends_with_the_same_model"),
    ("areal-like resume --accept-loss RUN", "trains",
     "controller/runtime/test_continuity.py::"
     "test_accepted_loss_goes_on_from_the_newest_shared_state_and_keeps_later_checkpoints_aside"),
    ("areal-like resume .*", "trains",
     "e2e/test_readme_commands.py::test_the_commands_for_a_job_of_your_own_work_one_after_the_other"),
    ("areal-like validate configs/cluster.yaml", "needs a Ray cluster",
     "e2e/test_ray.py::test_validate_says_who_sits_where_and_refuses_what_cannot_fit"),
    ("areal-like serve .* --adapter .*", "answers requests until it is ended",
     "controller/cli/test_serve.py::test_adapters_are_passed_to_the_server_by_their_names"),
    ("areal-like serve .*", "answers requests until it is ended",
     "controller/cli/test_serve.py::test_a_run_is_served_as_it_was_configured"),
    ("areal-like dashboard( .*)?", "shows pages until it is ended",
     "controller/dashboard/test_command.py::test_it_serves_until_a_signal_and_ends_with_0"),
    ("areal-like data review .*", "shows a page until it is ended",
     "controller/dashboard/test_review.py::test_a_decision_is_in_the_file_at_once_and_can_be_taken_back"),
    ("areal-like lineage .* --erase --yes", "changes the run of the other commands",
     "controller/runs/lineage/test_erasing.py::"
     "test_tokens_and_texts_of_the_row_alone_are_overwritten_and_the_run_still_verifies"),
    ("areal-like (drain|add) .*", "needs a run in progress",
     "e2e/test_crew.py::test_drained_worker_hands_over_and_an_added_one_is_taken_in"),
    ("areal-like worker --join .*", "needs a run in progress",
     "e2e/test_join.py::test_workers_join_one_is_killed_one_is_preempted_and_nothing_is_lost"),
    ("areal-like checkpoint .*", "needs a run in progress",
     "controller/runs/test_checkpoint.py::"
     "test_checkpoint_is_waited_for_longer_than_an_answer_and_its_place_is_printed"),
    ("areal-like verify .* --spot 20", "computes log-probs with the models of a run",
     "controller/runs/verify/test_spot_check.py::test_equal_log_probs_pass_and_the_others_are_counted_by_reason"),
    ("areal-like capsule .*", "trains the recorded steps again",
     "controller/runs/replay/test_capsule.py::test_random_steps_give_bit_equal_gradients_after_the_run_is_gone"),
    ("areal-like replay .* --engine.*", "computes log-probs with the models of a run",
     "controller/runs/replay/test_regenerate.py::"
     "test_answers_with_versions_that_change_within_them_are_drawn_again_without_a_difference"),
    ("areal-like replay .*", "trains the recorded steps again",
     "controller/runs/replay/test_capsule.py::test_random_steps_give_bit_equal_gradients_after_the_run_is_gone"),
    ("areal-like whatif quickstart (rollout|staleness).*", "simulates with the measurements of a whole run",
     "controller/runs/replay/test_whatif_schedule.py::test_both_schedules_and_the_measured_steps_are_printed"),
    ("areal-like whatif .*", "trains the recorded steps again",
     "controller/runs/replay/test_whatif.py::"
     "test_another_rate_changes_the_policy_after_the_first_step_and_nothing_of_the_run"),
    ("areal-like export RUN adapter/ --lora adapter", "needs a run with an adapter",
     "trainer/checkpoints/test_adapter_export.py::test_the_adapter_alone_needs_no_base"),
    ("areal-like export RUN FOLDER --lora merged", "needs a run with an adapter",
     "trainer/offline/test_adapter.py::test_an_exported_checkpoint_is_the_final_model"),
    ("areal-like (decrypt .*|export .* --decrypt)", "needs an encrypted run",
     "e2e/test_encryption.py::"
     "test_no_content_of_an_encrypted_run_is_in_its_files_and_with_the_key_every_command_reads_it"),
    ("areal-like export RUN OUT --best", "needs a run with a best checkpoint",
     "controller/runs/test_checkpoint.py::test_export_of_the_best_takes_the_one_that_is_kept_for_it"),
    (r"python -m benchmarks\..*", "measures for minutes to hours",
     "benchmarks/test_quick_forms.py::test_quick_forms_run_and_publish_nothing"),
    (r"python -m services\.reward serve.*", "answers requests until it is ended",
     "services/test_standalone.py::test_service_stands_in_a_realm_of_its_own_with_the_arguments_it_was_given"),
    (r"python -m services\.reward status .*", "needs a service that runs",
     "services/test_standalone.py::test_status_of_an_address_asks_in_the_shared_realm"),
    (r"python -m (areal_like|rollout|services|trainer)[\w.]*", "is a process of a run, which a launcher starts",
     "e2e/test_main_job.py::test_quickstart_learns_to_add"),
    ("python configs/agents/tool_sum.py", "needs an endpoint",
     "rollout/agent/test_shipped_agents.py::test_the_agent_calls_its_tool_and_ends_with_the_answer"),
    ("python configs/agents/traffic_sum.py .*", "needs an endpoint",
     "e2e/test_traffic.py::"
     "test_a_run_trains_on_live_conversations_with_a_killed_worker_and_missing_rewards"),
]  # fmt: skip
"""Commands that are not run here: a pattern of the whole command, why, and the test that runs such a command."""
STARTS_PROCESSES = ("areal-like score ", "areal-like data ", "areal-like validate ", "areal-like init ", "python ")
STATUS_OF_FINDINGS = {"data check": (0, 1)}
"""Commands that end with 1 where they find something."""
MEANT = {
    "RUN": "quickstart", "CHECKPOINT": "runs/quickstart/checkpoints/step_000024",
    "RUN/final": "runs/quickstart/final", "FOLDER": "model", "OUT": "out", "TEXT": "first try", "TAG": "tried",
    "FILE:LINE": "train.jsonl:12", "12.3": "12.1",
}  # fmt: skip
"""What stands for words in capital letters; groups of the recorded run have two samples."""
CONFIGS = {
    "simulate": "math_8b_8gpu", "sft": "offline/sft", "dpo": "offline/dpo", "reward-model": "offline/reward_model",
}  # fmt: skip
"""What stands for CONFIG, if not `my.yaml`."""
NUM_STEPS = 24
NUM_ROWS = 20


def shown() -> dict[str, Command]:
    """Every different command, by its text."""
    return {str(one): one for page in (README, *PAGES) for one in commands(page) if one.is_whole}


def meant(command: Command) -> list[str]:
    """The words with names instead of those in capital letters. A simulation of three steps stands for any other."""
    config = "my.yaml" if "out=FOLDER" in command.words else CONFIGS.get(command.words[1], "my.yaml")
    words = [{**MEANT, "CONFIG": config}.get(word, word) for word in command.words]
    return words + ["--steps=3"] * (words[1] == "simulate")


def kept_out(text: str) -> bool:
    return any(re.fullmatch(pattern, text.replace("'", "")) for pattern, _, _ in NOT_RUN)


def params(choose: Callable[[Command], bool]) -> list[Any]:
    found = []
    for text, command in sorted(shown().items()):
        if choose(command) and not kept_out(text):
            marks = [pytest.mark.processes] if text.startswith(STARTS_PROCESSES) else []
            marks += [pytest.mark.thorough] if text.startswith("areal-like simulate ") else []  # seconds each
            found.append(pytest.param(command, id=text[:100], marks=marks))
    return found


def is_prepared(command: Command) -> bool:
    return command.words[0] == "areal-like" and command.words[1] in PREPARED


# ------------------------------------------------------------ the folder that the pages assume


def rows(first: int, count: int) -> str:
    made = [
        {"id": n, "prompt": f"What is {n} plus one?", "answer": str(n + 1), "problem": f"{n}+1", "text": "Add.",
         "test_list": ["assert f(1) == 2"], "solution": f"\\boxed{{{n + 1}}}"}
        for n in range(first, first + count)
    ]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in made)


def answers() -> str:
    """Four answers to each of five rows; those to the first row agree with one another, not with its label."""
    made = [
        {"id": row, "prompt": f"What is {row} plus one?", "response": f"so \\boxed{{{row + 1}}}",
         "answer": str(row + 1), "gold": "77" if row == 0 else str(row + 1)}
        for row in range(5) for _ in range(4)
    ]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in made)


CONFIG = """\
name: mine
model: {init: {model_type: qwen3}, tokenizer: bytes}
data: {train: {path: train.jsonl}, eval: {path: heldout.jsonl}}
reward: {scorers: [{kind: math}]}
"""
REVIEW = {"where": "train.jsonl:1", "key": "0", "prompt": "What is 0 plus one?", "label": "1", "answer": "2"}
PROGRAM = {"program": "def f(x): return x + 1", "tests": ["assert f(1) == 2"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder, and a copy that it is restored from: a run records the absolute paths of its rows."""
    place = tmp_path_factory.mktemp("pages") / "here"
    place.mkdir()
    for name, first in (("train", 0), ("test", 100), ("heldout", 100), ("rows", 0), ("my", 0)):
        (place / f"{name}.jsonl").write_text(rows(first, NUM_ROWS))
    for name in ("train", "math500"):
        (place / "data" / "math").mkdir(parents=True, exist_ok=True)
        shutil.copy(place / "train.jsonl", place / "data" / "math" / f"{name}.jsonl")
    (place / "train-clean").mkdir()
    shutil.copy(place / "train.jsonl", place / "train-clean" / "rows.jsonl")
    (place / "answers.jsonl").write_text(answers())
    (place / "review.jsonl").write_text(json.dumps({**REVIEW, "decision": "accept"}) + "\n")
    (place / "programs.jsonl").write_text(json.dumps(PROGRAM) + "\n")
    for name in ("mine", "my", "config"):
        (place / f"{name}.yaml").write_text(CONFIG)
    (place / "stages.yaml").write_text("stages: [schema, exact_duplicates]\n")
    (scorer,) = [text for text in texts(DOCS / "rewards.md", "python") if text.startswith("# my_rewards.py")]
    (place / "my_rewards.py").write_text(scorer)
    run = make_run(place)
    shutil.copytree(run.final, place / "model")
    shutil.copytree(run.root, run.root.with_name("sft"))
    (place / "runs" / "first").mkdir()
    (place / "runs" / "first" / "config.yaml").write_text(CONFIG)
    shutil.copytree(place, place.with_name("kept"))
    return place, place.with_name("kept")


def make_run(place: Path) -> RunFolder:
    """The recorded run with its rows, logs and a tokenizer, sealed again."""
    run = make_recorded_run(place / "runs", name="quickstart", num_steps=NUM_STEPS)
    run.config.write_text(
        run.config.read_text() + f"name: quickstart\nmodel: {{init: {{model_type: qwen3}}, tokenizer: bytes}}\n"
        f"data: {{train: {{path: {place}/train.jsonl}}, shuffle: false}}\n"
    )
    record_data(load_config(str(run.config)).config, run.root)
    zoo.write_logs(run)
    seal = read_seal(run)
    assert seal is not None
    write_seal(run, run_id=seal["run_id"], last_digest=seal["last_digest"])
    return run


@pytest.fixture
def here(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder as it was made, which is the current one."""
    place, kept = made
    shutil.rmtree(place)
    shutil.copytree(kept, place)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delenv("AREAL_LIKE_USER_PATH", raising=False)
    return place


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Address of a model that answers everything with 1."""
    server = OddServer(lambda number, handler, asked: reply(handler, chat("so \\boxed{1}", usage=(4, 6))))
    yield server.url
    server.close()


def target_of(words: list[str]) -> str | None:
    """What the command writes, which must not exist."""
    if "-o" in words:
        return words[words.index("-o") + 1]
    place = {"init": 2, "export": 3}.get(words[1])
    return words[place] if place else None


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


# ------------------------------------------------------------ tests


@pytest.mark.parametrize("command", params(lambda one: not is_prepared(one)))
def test_a_shown_command_ends_well(
    command: Command, here: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("http://127.0.0.1:8000", endpoint) for word in meant(command)]
    if words[0] == "python":
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{here}"}
        done = subprocess.run(
            [sys.executable, *words[1:]], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        return
    assert words[0] == "areal-like"
    if target := target_of(words):
        remove(here / target)
    words += ["--no-probe"] * (words[1] == "init")
    status = main(words[1:])
    assert status in STATUS_OF_FINDINGS.get(" ".join(words[1:3]), (0,)), capsys.readouterr()


@pytest.mark.parametrize("command", params(is_prepared))
def test_the_config_of_a_command_that_trains_or_samples_is_valid_with_its_overrides(
    command: Command, made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made[1])
    arguments = make_parser(lambda text: pytest.fail(text)).parse_args(meant(command)[1:])
    load = load_offline if is_offline_file(arguments.config, arguments.overrides) else load_config
    assert load(arguments.config, arguments.overrides)


def test_no_entry_of_the_list_is_left_over_and_each_names_a_test() -> None:
    texts_of_all = [text.replace("'", "") for text in shown()]
    first = {text: next((p for p, _, _ in NOT_RUN if re.fullmatch(p, text)), None) for text in texts_of_all}
    assert [pattern for pattern, _, _ in NOT_RUN if pattern not in first.values()] == []
    for place in [*PREPARED.values(), *(test for _, _, test in NOT_RUN)]:
        file, _, name = place.partition("::")
        tree = ast.parse((REPOSITORY / "tests" / file).read_text())
        assert name in [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)], place


def test_what_make_builds_is_a_target() -> None:
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    built = {one.words[1] for one in shown().values() if one.words[0] == "make"}
    assert built == {"quickstart", "test"}
    assert built <= set(targets)


def test_most_commands_are_run_or_prepared() -> None:
    """A command that matches no pattern of the list is run: the list cannot grow to hold everything unnoticed."""
    ours = [text for text, one in shown().items() if one.words[0] == "areal-like"]
    assert len(ours) > 120
    assert sum(not kept_out(text) for text in ours) > 0.6 * len(ours)
