"""Claims about `trainer.teacher`: which declarations are refused, under which key, and what a run holds of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from valid_config import make

from areal_like.decoder_shape import PUBLIC_SHAPES, shape_of
from controller.config.derived import advise, derive
from controller.config.memory.estimate import rollout_memory, trainer_memory
from controller.config.run_config import RunConfig
from controller.config.validation.run import cross_check

FROZEN, COPY = {"name": "big", "source": "start"}, {"name": "big", "source": "policy", "refresh_every": 3}
ROLE = {"name": "player", "source": "policy"}
ENDPOINT = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
EXTERNAL = {"name": "big", "endpoint": {**ENDPOINT, "api": "tokens"}}
DISTILLATION = {"kind": "distillation"}


def taught(teacher: Any, *models: dict[str, Any], workflow: str = "single_turn", max_context: int = 2048) -> RunConfig:
    trainer = {"teacher": teacher, "advantage": DISTILLATION}
    return make(
        trainer=trainer, rollout={"workflow": workflow, "models": models, "engine": {"max_context": max_context}}
    )


def said(config: RunConfig) -> list[str]:
    return [str(problem) for problem in cross_check(config)]


@pytest.mark.parametrize("workflow", ["single_turn", "my:Own"])
@pytest.mark.parametrize("models", [(FROZEN,), (COPY,), ({"name": "big", "path": "x/y"},), (EXTERNAL,)])
def test_a_model_with_weights_of_its_own_can_teach_whether_a_workflow_calls_it_or_not(
    workflow: str, models: tuple[dict[str, Any], ...]
) -> None:
    assert said(taught({"model": "big"}, *models, workflow=workflow)) == []


def test_a_policy_that_plays_roles_can_have_a_teacher() -> None:
    assert said(taught({"model": "big"}, FROZEN, ROLE, workflow="my:Own")) == []


@pytest.mark.parametrize(
    ("teacher", "models", "words"),
    [
        (
            {},
            (),
            "trainer.teacher: neither path nor model is given -> set path to a model folder for a teacher on the "
            "trainer's ranks",
        ),
        ({"path": "x", "model": "big"}, (FROZEN,), "trainer.teacher: path and model are mutually exclusive"),
        (
            {"model": "big"},
            (),
            "trainer.teacher.model: there is no model `big` in rollout.models -> declare it with rollout.models: "
            "[{name: big,",
        ),
        (
            {"model": "bug"},
            (FROZEN,),
            "trainer.teacher.model: there is no model `bug` in rollout.models -> did you mean big?",
        ),
        (
            {"model": "player"},
            (ROLE,),
            "trainer.teacher.model: `player` is a role of the policy, which has no separate weights",
        ),
        (
            {"model": "big"},
            ({"name": "big", "endpoint": ENDPOINT},),
            "rollout.models.0.endpoint.api: the teacher `big` must return log-probs of given tokens",
        ),
        (
            {"model": "big"},
            ({**FROZEN, "max_context": 100},),
            "rollout.models.0.max_context: the teacher `big` accepts up to 100 tokens, but samples may have 2048",
        ),
    ],
)
def test_what_cannot_teach_is_refused_under_its_key(
    teacher: dict[str, Any], models: tuple[dict[str, Any], ...], words: str
) -> None:
    (problem,) = said(taught(teacher, *models, workflow="my:Own"))
    assert words in problem


def test_a_model_that_no_built_in_workflow_calls_is_refused_if_it_is_not_the_teacher() -> None:
    problems = said(taught({"model": "big"}, FROZEN, {**FROZEN, "name": "judge"}))
    assert any("rollout.models: the workflow `single_turn` does not call models" in one for one in problems)


def test_a_teacher_without_its_advantage_and_the_advantage_without_a_teacher_are_refused() -> None:
    rollout = {"models": (FROZEN,)}
    (problem,) = said(make(trainer={"teacher": {"model": "big"}}, rollout=rollout))
    assert "trainer.teacher: this section is not used with trainer.advantage.kind: grpo" in problem
    problems = said(make(trainer={"advantage": DISTILLATION}))
    assert problems == [
        "trainer.advantage.kind: `distillation` requires a teacher, but none is configured -> trainer.teacher: {path: "
        "FOLDER},"
        " or {model: NAME}"
    ]


def test_the_rollout_workers_hold_it_instead_of_the_trainers_ranks(tmp_path: Path) -> None:
    teacher = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(teacher))
    own, policy = shape_of(teacher), PUBLIC_SHAPES["Qwen/Qwen3-0.6B"]
    assert own is not None
    model = {"name": "big", "path": str(tmp_path), "num_slots": 1, "max_context": 64}
    hosted, held = taught({"model": "big"}, model), taught({"path": str(tmp_path)})
    cache = 2 * own.layers * own.key_width * 64
    assert rollout_memory(hosted, policy).parts["model big"] == 4.0 * (own.parameters + cache)
    assert "teacher" not in trainer_memory(hosted, policy)[0].parts
    assert trainer_memory(held, policy)[0].parts["teacher"] == 4 * own.parameters
    assert not any(name.startswith("model ") for name in rollout_memory(held, policy).parts)


def test_validate_says_which_model_teaches_and_that_it_needs_no_slots() -> None:
    config = taught({"model": "big"}, FROZEN)
    (line,) = (one for one in derive(config) if one.name == "models called")
    assert line.formula == "big: starting model, frozen, the teacher"
    advice = "rollout.models: the teacher `big` generates no answers"
    assert [one for one in advise(config) if one.startswith(advice)]
    for other in (
        taught({"model": "big"}, {**FROZEN, "num_slots": 1}),
        taught({"model": "big"}, FROZEN, workflow="my:Own"),
    ):
        assert not [one for one in advise(other) if one.startswith(advice)]


def test_an_external_teacher_needs_samples_at_temperature_1() -> None:
    trainer = {"teacher": {"model": "big"}, "advantage": DISTILLATION}
    config = make(trainer=trainer, rollout={"models": [EXTERNAL]}, sampling={"temperature": 0.7})
    assert any("returns log-probs at temperature 1, but samples are drawn at 0.7" in one for one in said(config))
