"""Claims about `rollout.models`: which declarations are refused, under which key, and the memory of a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_adapter import adapter_in
from valid_config import make

from areal_like.decoder_shape import PUBLIC_SHAPES
from controller.config.derived import derive
from controller.config.memory.called_models import called_model_parts
from controller.config.memory.estimate import rollout_memory
from controller.config.run_config import RunConfig
from controller.config.validation.run import cross_check

JUDGE, RIVAL = {"name": "judge", "source": "start"}, {"name": "rival", "source": "policy", "refresh_every": 3}
ROLE = {"name": "player", "source": "policy"}
EXTERNAL = {"name": "helper", "endpoint": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}}


def declared(*models: dict[str, Any], workflow: str = "my:Own", **sections: Any) -> RunConfig:
    return make(rollout={"workflow": workflow, "models": models}, **sections)


def said(config: RunConfig) -> list[str]:
    return [str(problem) for problem in cross_check(config)]


@pytest.mark.parametrize(
    "models",
    [
        (JUDGE,), (RIVAL, JUDGE), (ROLE,), (EXTERNAL,), (EXTERNAL, ROLE), (ROLE, {**ROLE, "name": "critic"}, RIVAL),
        ({"name": "sql", "adapter": "a"}, {**JUDGE, "adapter": "b"}, {"name": "m", "path": "x", "adapter": "a"}),
    ],
)  # fmt: skip
def test_frozen_models_copies_and_roles_are_valid(models: tuple[dict[str, Any], ...]) -> None:
    assert said(declared(*models)) == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "Judge", "source": "start"}, "rollout.models.0.name: `Judge` cannot be the name of a model"),
        ({"name": "policy", "source": "start"}, "rollout.models.0.name: `policy` cannot be the name"),
        ({"name": "judge"}, "rollout.models.0.path: neither source nor path is given"),
        ({**JUDGE, "path": "x"}, "rollout.models.0.path: source and path are mutually exclusive"),
        ({"name": "judge", "path": ""}, "rollout.models.0.path: the value is empty"),
        ({**JUDGE, "refresh_every": 2}, "rollout.models.0.refresh_every: only a copy of the policy can be refreshed"),
        ({**JUDGE, "adapter": ""}, "rollout.models.0.adapter: the value is empty"),
        (
            {**RIVAL, "adapter": "a"},
            "rollout.models.0.adapter: an adapter requires a frozen base model, but the policy changes during training",
        ),
        (
            {**ROLE, "adapter": "a"},
            "rollout.models.0.adapter: an adapter requires a frozen base model, but the policy changes during training",
        ),
        (
            {"name": "judge", "adapter": "a", "refresh_every": 2},
            "rollout.models.0.refresh_every: only a copy of the policy can be refreshed",
        ),
        (
            {**JUDGE, "path": "x", "adapter": "a"},
            "rollout.models.0.path: source and path are mutually exclusive",
        ),
        (
            {**JUDGE, "trained": True},
            "rollout.models.0.trained: starting model, frozen cannot be trained, because a run trains only one policy",
        ),
        ({**RIVAL, "trained": True}, "a run trains only one policy"),
        ({**JUDGE, "device": "tpu"}, "rollout.models.0.device: there is no device `tpu`"),
        ({**ROLE, "num_slots": 4}, "rollout.models.0.num_slots: this key has no effect on a role of the policy"),
        (
            {**ROLE, "temperature": 0.5},
            "rollout.models.0.temperature: tokens sampled at temperature 0.5 cannot be used for training at "
            "temperature 1",
        ),
        ({**ROLE, "trained": False}, "rollout.models: the policy is called in the roles player, but none of these"),
        ({**EXTERNAL, "path": "x"}, "rollout.models.0.path: this key has no effect on a model behind an endpoint"),
        (
            {**EXTERNAL, "num_slots": 3},
            "rollout.models.0.num_slots: this key has no effect on a model behind an endpoint",
        ),
        ({**EXTERNAL, "trained": True}, "rollout.models.0.trained: a model behind an endpoint cannot be trained"),
    ],
)
def test_what_cannot_be_is_refused_under_its_key(model: dict[str, Any], words: str) -> None:
    (problem,) = said(declared(model))
    assert words in problem


def test_names_are_used_once() -> None:
    twice = "rollout.models: 2 models have the name `judge` -> give each model a different name"
    assert said(declared(JUDGE, JUDGE)) == [twice]


def test_a_role_that_is_not_trained_may_have_a_temperature_of_its_own() -> None:
    assert said(declared(ROLE, {**ROLE, "name": "critic", "trained": False, "temperature": 0.5})) == []


def test_a_built_in_workflow_calls_no_models() -> None:
    problems = said(declared(JUDGE, workflow="single_turn"))
    assert any("rollout.models: the workflow `single_turn` does not call models" in one for one in problems)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"emulation": {}}, "emulated devices cannot run a model with separate weights"),
        ({"placement": "colocated", "mode": "sync"}, "does not release its memory while the trainer uses the devices"),
        ({"trainer": {"weights": {"kind": "distributed"}}}, "`distributed` transfers versions without files"),
    ],
)
def test_weights_of_its_own_exclude_other_settings(sections: dict[str, Any], words: str) -> None:
    assert any(words in one for one in said(declared(RIVAL, **sections)))
    assert not any(words in one for one in said(declared(ROLE, **sections)))


def test_a_worker_holds_one_set_of_weights_of_a_frozen_model_and_two_of_a_copy() -> None:
    shape = PUBLIC_SHAPES["Qwen/Qwen3-0.6B"]
    small = {**JUDGE, "num_slots": 2, "max_context": 100, "dtype": "bfloat16"}
    elsewhere = {**JUDGE, "name": "far", "device": "cuda:1"}
    config = declared(small, {**small, **RIVAL}, elsewhere, {**ROLE, "name": "player"})
    cache = 2 * shape.layers * shape.key_width * 200
    expected = {"model judge": 2.0 * (shape.parameters + cache), "model rival": 2.0 * (2 * shape.parameters + cache)}
    assert dict(called_model_parts(config, shape)) == expected
    with_models, without = rollout_memory(config, shape), rollout_memory(declared(), shape)
    assert with_models.needed_bytes - without.needed_bytes == sum(expected.values())
    assert with_models.parts == {**without.parts, **expected}


def test_models_that_share_an_engine_take_one_base_one_cache_and_their_adapters(tmp_path: Path) -> None:
    shape = PUBLIC_SHAPES["Qwen/Qwen3-0.6B"]
    up = "model.layers.0.mlp.up_proj"
    for name in ("a", "b"):
        adapter_in(tmp_path / name, modules={up: (shape.hidden, shape.inner)})
    small = {"num_slots": 2, "max_context": 100, "dtype": "bfloat16"}
    models = [
        {**small, "name": "sql", "adapter": str(tmp_path / "a")},
        {**small, **JUDGE},
        {**small, "name": "chat", "source": "start", "adapter": str(tmp_path / "b")},
        {**small, "name": "far", "source": "start", "adapter": str(tmp_path / "none"), "num_slots": 1},
    ]
    cache = 2 * shape.layers * shape.key_width * 100
    assert dict(called_model_parts(declared(*models), shape)) == {
        "models sql, judge, chat": 2.0 * (shape.parameters + 2 * cache),
        "adapters of sql, judge, chat": 2.0 * 2 * 4 * (shape.hidden + 2 * shape.inner),
        "model far": 2.0 * (shape.parameters + cache),
    }


def test_validate_says_what_each_model_is() -> None:
    config = declared(
        JUDGE, RIVAL, ROLE, {**ROLE, "name": "critic", "trained": False}, {"name": "m", "path": "x/y"},
        {"name": "sql", "adapter": "a/sql"},
    )  # fmt: skip
    (line,) = (one for one in derive(config) if one.name == "models called")
    assert line.formula == (
        "judge: starting model, frozen; rival: copy of the policy, frozen for 3 versions; player: role of the policy,"
        " trained; critic: role of the policy, not trained; m: x/y, frozen; sql: starting model with adapter a/sql,"
        " frozen"
    )
