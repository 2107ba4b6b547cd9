"""The workflow `verifiers` with the real package, in environments of its own: 0.1 and 0.4."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_policy import Policy
from ecosystem import REPOSITORY, interpreter_of

from areal_like.errors import UserError
from areal_like.import_check import USER_PATH
from rollout.agent import verifiers
from rollout.agent.verifiers import VerifiersWorkflow, version_in
from rollout.workflow import load_workflow

AGENT = {"agent": {"harness": {"id": "two_turns"}, "runtime": {"type": "subprocess"}}}
END = "<|im_end|>"


@pytest.fixture(autouse=True)
def shipped_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_PATH, str(REPOSITORY / "configs" / "environments"))


def episode(workflow: Any, *lines: str, number: int | None = 34, split: str = "train") -> tuple[Any, Policy]:
    """What becomes of a sample in which the policy says these lines."""
    policy = Policy(*(f"{line}{END}" for line in lines))
    row = {"prompt": "-", "episode": number, "split": split}
    return asyncio.run(workflow.run(SimpleNamespace(row=row), policy)), policy


@pytest.mark.processes
def test_an_environment_of_verifiers_0_1_gives_its_reward_and_a_failure_gives_none() -> None:
    workflow = load_workflow("verifiers", {"environment": "digit_sums", "python": interpreter_of("verifiers-0.1"),
                                           "eval_options": {"largest": 0}})  # fmt: skip
    sample, policy = episode(workflow, "6", "7")  # task 34 of 100 is 3+4
    assert (sample.verdict.kind, sample.verdict.value) == ("scored", pytest.approx(0.6))
    assert sample.verdict.components["right"] == 0.5
    assert sample.others == ()
    assert policy.sampled(sample.trajectory) == f"6{END}7{END}"
    text = policy.tokens.decode(sample.trajectory.tokens_T, with_special_tokens=True)
    assert "<|im_start|>user\n3+4=" in text
    assert "<|im_start|>user\n6?" in text
    sample, _ = episode(workflow, "0", split="eval")  # all its tasks are 0+0
    assert sample.verdict.value == pytest.approx(1.1)
    sample, _ = episode(workflow, "7", number=None)
    assert (sample.verdict.kind, sample.verdict.value, sample.verdict.failed_in) == ("crashed", None, "agent")
    assert "the row has no integer `episode`" in sample.verdict.reason


@pytest.mark.thorough
@pytest.mark.processes
def test_a_task_set_of_verifiers_0_4_is_trained_by_requests_and_by_token_ids(tmp_path: Path) -> None:
    options = {"environment": "digit_taskset", "python": interpreter_of("verifiers-0.4"), "options": AGENT}
    sample, policy = episode(load_workflow("verifiers", options), "6", "7")
    assert (sample.verdict.kind, sample.verdict.value) == ("scored", pytest.approx(1.1))
    assert policy.sampled(sample.trajectory) == f"6{END}7{END}"
    policy.tokenizer.save_pretrained(tmp_path)
    empty = {**AGENT, "taskset": {"largest": -1}}
    by_ids = load_workflow(
        "verifiers", {**options, "endpoint": "tokens", "tokenizer": str(tmp_path), "eval_options": empty}
    )
    sample, policy = episode(by_ids, "6", "7")
    assert (sample.verdict.kind, sample.verdict.value) == ("scored", pytest.approx(1.1)), sample.verdict.reason
    assert policy.sampled(sample.trajectory) == f"6{END}7{END}"
    assert (sample.others, sample.verdict.components["turns"]) == ((), 2.0)
    sample, _ = episode(by_ids, "7", split="eval")
    assert (sample.verdict.kind, sample.verdict.value, sample.verdict.failed_in) == ("crashed", None, "agent")
    assert "the environment's task set is empty" in sample.verdict.reason


def test_an_episode_begins_again_elsewhere() -> None:
    assert not VerifiersWorkflow.is_resumable, "its program would have to be resumed with it"


def made(**options: Any) -> VerifiersWorkflow:
    return VerifiersWorkflow(**{"environment": "e", **options})


def test_without_the_package_the_extra_and_the_option_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version_in.cache_clear()
    asked = subprocess.CompletedProcess([], 0, stdout="\n", stderr="")
    monkeypatch.setattr(verifiers.subprocess, "run", lambda *_, **__: asked)
    with pytest.raises(UserError) as caught:
        made()
    assert str(caught.value).startswith(
        f"rollout.workflow_options.python: the `verifiers` package is not installed for {sys.executable} -> "
        "pip install 'areal-like[verifiers]', or set the interpreter"
    )


@pytest.mark.parametrize(
    ("installed", "options", "words"),
    [
        ("0.1.14", {"endpoint": "tokens", "tokenizer": "t"}, "`endpoint: tokens` requires verifiers 0.4, but"),
        ("0.4.0", {"endpoint": "tokens"}, "`endpoint: tokens` requires a tokenizer"),
        ("0.4.0", {"endpoint": "text"}, "`endpoint` must be `chat` or `tokens`, not 'text'"),
        ("0.4.0", {"environment": ""}, "environment must be the name of a verifiers environment, not ''"),
        ("0.4.0", {"python": "no/such/python"}, "there is no program"),
        ("0.4.0", {"timeout_s": 0.0}, "`timeout_s` must be greater than 0"),
    ],
)
def test_options_that_cannot_be_used_say_why(
    monkeypatch: pytest.MonkeyPatch, installed: str, options: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(verifiers, "version_in", lambda _: installed)
    with pytest.raises(UserError) as caught:
        made(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize(("installed", "module"), [("0.1.14", "verifiers.envs.environment"), ("0.4.0", "verifiers.v1")])
def test_what_is_imported_once_depends_on_the_version(
    monkeypatch: pytest.MonkeyPatch, installed: str, module: str
) -> None:
    monkeypatch.setattr(verifiers, "version_in", lambda _: installed)
    assert module in made()._agent._programs._modules  # type: ignore[attr-defined]
    assert not hasattr(made(preload=False)._agent._programs, "_modules")


def test_a_path_of_an_interpreter_counts_from_the_folder_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(verifiers, "version_in", lambda path: seen.append(path) or "0.4.0")
    monkeypatch.setenv(USER_PATH, str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    made(python="bin/python")
    made(python="python")
    assert seen == [str(tmp_path / "bin" / "python"), sys.executable]
