"""Selects the user's code in a config that must be checked, and the rows to test it with.

The code is imported in user_code.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areal_like.import_path import is_import_path
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.config.validation.objectives import is_for_any_policy
from controller.data.gold_answers import gold_answers
from controller.data.table import Table
from controller.preflight import user_code
from controller.wiring.process_specs import (
    ENGINE_CHECK,
    ENVIRONMENT_CHECK,
    OBJECTIVE_CHECK,
    SCORER_CHECK,
    WORKFLOW_CHECK,
)

NUM_TRIED_ROWS = 2


def problems_of(config: RunConfig, train: Table | None) -> Iterator[Problem]:
    """Problems of the code that this run would call. train: rows to test scorers with."""
    own = {
        SCORER_CHECK: _own_scorers(config),
        ENVIRONMENT_CHECK: _own_environment(config),
        WORKFLOW_CHECK: _own_workflow(config),
        ENGINE_CHECK: _own_engine(config),
        OBJECTIVE_CHECK: _own_objectives(config),
    }
    for checker, functions in own.items():
        tries = _gold(train) if checker == SCORER_CHECK and config.rollout.workflow == "single_turn" else []
        yield from user_code.problems_of(
            checker, functions, config.launch.startup_timeout_s, tries, config.reward.timeout_s
        )


def _gold(table: Table | None) -> list[tuple[dict[str, Any], str]]:
    """The first rows with their reference answers, in the forms that a model may write."""
    rows = [dict(table[index]) for index in range(min(len(table), NUM_TRIED_ROWS))] if table is not None else []
    return [(rows[row], response) for row, column, response in gold_answers(rows) if column == "answer"]


def _own_scorers(config: RunConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """The user's functions that this run's own reward services will call, by key."""
    scorers = () if config.reward.addresses else config.reward.scorers
    return {
        f"reward.scorers.{index}.kind": (scorer.kind, scorer.options)
        for index, scorer in enumerate(scorers)
        if ":" in scorer.kind
    }


def _own_environment(config: RunConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """The user's environment, or the options of a built-in one, if this run's own reward services run it."""
    environment = None if config.reward.addresses else config.reward.environment
    if environment is None or not (":" in environment.kind or environment.options):
        return {}
    return {"reward.environment": (environment.kind, environment.options)}


def _own_workflow(config: RunConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    name = config.rollout.workflow
    if ":" not in name and not config.rollout.workflow_options:
        return {}
    models = [model.name for model in config.rollout.models]
    given = {"options": config.rollout.workflow_options, "models": models, "teacher": config.trainer.teacher_model}
    return {"rollout.workflow": (name, given)}


def _own_engine(config: RunConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    engine = config.rollout.engine
    return {"rollout.engine.kind": (engine.kind, {})} if is_import_path(engine.kind) else {}


def _own_objectives(config: RunConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """The user's loss and advantages, with their complete sections."""
    loss, advantage = config.trainer.loss, config.trainer.advantage
    has_critic = config.trainer.critic is not None
    found = {}
    if names := [kind for kind in (loss.kind, *(one.kind for one in loss.corrections)) if ":" in kind]:
        key = "trainer.loss.kind" if names[0] == loss.kind else "trainer.loss.corrections"
        facts = {
            "of": "loss",
            "has_critic": has_critic,
            "has_versions": config.trainer.version_logprobs is not None,
            "is_for_any_policy": is_for_any_policy(config),
        }
        found[key] = (", ".join(names), facts | loss.model_dump(mode="json"))
    if ":" in advantage.kind:
        section = {"of": "advantage", "has_critic": has_critic, **advantage.model_dump(mode="json")}
        found["trainer.advantage.kind"] = (advantage.kind, section)
    return found
