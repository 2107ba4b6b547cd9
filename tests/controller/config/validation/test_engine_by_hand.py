"""Workflows and what they need or cannot have, each at the value that is still right and the first that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from valid_config import make

from controller.config.problems import Problem
from controller.config.validation.engine import device_problems, hardware_problems, rollout_problems

ENVIRONMENT = {"kind": "guess_number"}
TOOLS = {"kind": "tools", "options": {"tools": ["python"]}}
NO_SCORERS: dict[str, Any] = {"scorers": []}
SCORED = {"scorers": [{"kind": "math"}]}
TRAFFIC: dict[str, Any] = {
    "rollout__workflow": "traffic", "rollout__workflow_options": {"port": 8001}, "group_size": 1,
    "data": {"train": {"generator": "traffic"}}, "reward": NO_SCORERS,
}  # fmt: skip
ELSEWHERE = {"addresses": ["tcp://host:1"]}


def found(**changes: Any) -> list[Problem]:
    return list(rollout_problems(make(**changes)))


def first_keys(**changes: Any) -> list[str]:
    return [problem.keys[0] for problem in found(**changes)]


def environment(workflow: str, **settings: Any) -> dict[str, Any]:
    """A run with this workflow and an environment."""
    made = {**(TOOLS if workflow == "tools" else ENVIRONMENT), **settings}
    reward = {**(NO_SCORERS if workflow == "environment" else SCORED), "environment": made}
    return {"rollout__workflow": workflow, "reward": reward}


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__workflow": "single_turn", "reward": SCORED}, TRAFFIC,
        {**TRAFFIC, "rollout__workflow_options": {"port": 65534}, "rollout__num_workers": 2},
        {"rollout__workflow": "single_turn", "reward": ELSEWHERE},
        {"rollout__workflow": "my_workflow:Mine", "reward": NO_SCORERS}, environment("environment"),
        environment("tools"),
        {"rollout__workflow": "environment", "reward": ELSEWHERE}, {"rollout__workflow": "tools", "reward": ELSEWHERE},
        {"rollout__workflow": "agent", "rollout__workflow_options": {"command": ["x"]}, "reward": SCORED},
        {"rollout__workflow": "agent", "rollout__workflow_options": {"command": ["x"], "reward": "agent"},
         "reward": NO_SCORERS},
        {"rollout__prompt_template": "{prompt}"},
    ],
)  # fmt: skip
def test_workflow_that_has_what_it_needs_is_no_problem(changes: dict[str, Any]) -> None:
    assert found(**changes) == []


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"rollout__workflow": "single"}, ["rollout.workflow"]),
        ({"rollout__workflow": "single_turn", "reward": NO_SCORERS}, ["reward.scorers"]),
        ({"rollout__workflow": "tools", "reward": {**NO_SCORERS, "environment": TOOLS}}, ["reward.scorers"]),
        ({"rollout__workflow": "environment", "reward": {**SCORED, "environment": ENVIRONMENT}}, ["reward.scorers"]),
        ({"rollout__workflow": "environment", "reward": NO_SCORERS}, ["reward.environment"]),
        ({"rollout__workflow": "tools", "reward": SCORED}, ["reward.environment"]),
        ({"rollout__workflow": "single_turn", "reward": {**SCORED, "environment": ENVIRONMENT}}, ["rollout.workflow"]),
        ({"rollout__workflow": "single_turn", "rollout__workflow_options": {"a": 1}}, ["rollout.workflow_options"]),
        ({"rollout__workflow": "agent", "reward": SCORED}, ["rollout.workflow_options"]),
        ({"rollout__workflow": "agent", "rollout__workflow_options": {"command": ["x"]}, "reward": NO_SCORERS},
         ["reward.scorers"]),
        ({"rollout__workflow": "agent", "rollout__workflow_options": {"command": ["x"], "reward": "scorer"},
          "reward": NO_SCORERS}, ["reward.scorers"]),
        ({"rollout__workflow": "agent", "rollout__workflow_options": {"command": ["x"]}, "reward": SCORED,
          "rollout__prompt_template": "{prompt}"}, ["rollout.prompt_template"]),
        ({**environment("tools"), "rollout__prompt_template": "{prompt}"}, ["rollout.prompt_template"]),
        ({"rollout__prompt_template": "prompt"}, ["rollout.prompt_template"]),
        ({**TRAFFIC, "rollout__workflow_options": {}}, ["rollout.workflow_options"]),
        ({**TRAFFIC, "rollout__workflow_options": {"port": 65535}, "rollout__num_workers": 2},
         ["rollout.workflow_options.port"]),
        ({**TRAFFIC, "group_size": 2}, ["group_size"]),
        ({**TRAFFIC, "data": {"train": {"generator": "running_sum"}}}, ["data.train"]),
        ({**TRAFFIC, "data": {"train": {"generator": "traffic"}, "eval": {"generator": "running_sum"}}}, ["data.eval"]),
        ({**TRAFFIC, "data": {"train": {"generator": "traffic"}, "mix": [{"generator": "running_sum"}]}}, ["data.mix"]),
        ({**TRAFFIC, "reward": SCORED}, ["reward.scorers"]),
        ({**TRAFFIC, "reward": {**NO_SCORERS, "environment": ENVIRONMENT}}, ["reward.environment"]),
        ({**TRAFFIC, "reward": {**NO_SCORERS, "on_failure": 0.0}}, ["reward.on_failure"]),
        ({**TRAFFIC, "rollout__prompt_template": "{prompt}"}, ["rollout.prompt_template"]),
        ({**TRAFFIC, "rollout__safety": [{"kind": "secrets"}]}, ["rollout.safety"]),
        ({"rollout__workflow": "single_turn", "reward": SCORED, "data": {"train": {"generator": "traffic"}}},
         ["data.train.generator"]),
    ],
)  # fmt: skip
def test_workflow_that_lacks_something_or_has_too_much_is_one_problem(changes: dict[str, Any], keys: list[str]) -> None:
    problems = found(**changes)
    assert [problem.keys[0] for problem in problems] == keys
    assert all(problem.what and problem.remedy for problem in problems)


@pytest.mark.parametrize(("call_s", "is_problem"), [(4.9, False), (5.0, True), (6.0, True)])
def test_call_of_a_tool_ends_before_its_process_is(call_s: float, is_problem: bool) -> None:
    options = {"tools": ["python"], "call_timeout_s": call_s}
    keys = first_keys(**environment("tools", options=options, step_timeout_s=5.0))
    assert keys == (["reward.environment.options.call_timeout_s"] if is_problem else [])


@pytest.mark.parametrize(("num_chars", "is_problem"), [(1, False), (15_360, False), (15_361, True)])
def test_results_of_a_turn_fit_an_observation(num_chars: int, is_problem: bool) -> None:
    """One call of 15,360 characters is 60 kB, and the marks of 64 calls are the other 4 kB."""
    options = {"tools": ["python"], "max_calls": 1, "max_result_chars": num_chars}
    problems = found(**environment("tools", options=options, max_observation_kb=64))
    assert bool(problems) == is_problem
    if is_problem:
        assert "may take 65 kB, but an observation is limited to 64 kB" in problems[0].what


@pytest.mark.parametrize(
    ("retries", "score_s", "is_problem"), [(1, 20.1, False), (1, 20.0, True), (0, 10.1, False), (2, 30.0, True)]
)
def test_workers_wait_longer_than_a_step_that_hangs_with_its_retries(
    retries: int, score_s: float, is_problem: bool
) -> None:
    changes = environment("environment", retries=retries, step_timeout_s=10.0)
    keys = first_keys(**changes, rollout__score_timeout_s=score_s)
    assert keys == (["reward.environment.step_timeout_s"] if is_problem else [])


@pytest.mark.parametrize(
    ("device", "is_known"), [("cpu", True), ("cuda", True), ("cuda:0", True), ("cuda:12", True), ("cuda:", False),
                             ("cuda:x", False), ("gpu", False), ("cpu:0", False), ("xcuda", False), ("", False)],
)  # fmt: skip
def test_device_is_a_processor_or_a_gpu_by_number(device: str, is_known: bool) -> None:
    warm_start = {"data": {"generator": "running_sum"}, "sft": {"device": device}}
    config = make(rollout__engine={"device": device}, trainer__device=device, warm_start=warm_start)
    keys = ["rollout.engine.device", "trainer.device", "warm_start.sft.device"]
    assert [problem.keys[0] for problem in device_problems(config)] == ([] if is_known else keys)


def test_gpu_that_is_not_known_is_named_and_none_is_no_problem() -> None:
    assert list(hardware_problems(make())) == []
    (problem,) = hardware_problems(make(hardware__gpu="H1000"))
    assert problem.keys == ("hardware.gpu",)
    assert "H1000" in problem.what
