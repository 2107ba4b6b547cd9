"""Settings that would store content in the clear are refused together with `encryption`."""

from __future__ import annotations

import pytest

from controller.config.loading import load_config
from controller.config.problems import ConfigError

PLAIN = ["warm_start=null", "encryption.key_file=/keys/run.key"]


def problems(*overrides: str) -> list[str]:
    try:
        load_config("quickstart", [*PLAIN, *overrides])
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_a_plain_run_may_be_encrypted():
    assert problems() == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("warm_start={data: {generator: running_sum}}", "warm_start"),
        ("data.train={path: /rows.jsonl, stages: [schema]}", "data.train.stages"),
        ("data.train={path: /rows.jsonl, follow: true}", "data.train.follow"),
        ("metrics.tensorboard=true", "metrics.tensorboard"),
        ("metrics.wandb={}", "metrics.wandb"),
        ("metrics.mlflow={}", "metrics.mlflow"),
        ("metrics.trackio={}", "metrics.trackio"),
        ("metrics.openlineage={}", "metrics.openlineage"),
        ("trainer.weights.kind=disk", "trainer.weights.kind"),
        ("launch.kind=ray", "launch.kind"),
        (
            "rollout.models=[{name: a, endpoint: {base_url: 'http://a/v1', model: b}}]",
            "rollout.models.0.endpoint.record",
        ),
        (
            "reward.scorers=[{kind: llm_judge, options: {base_url: 'http://a/v1', model: b}}]",
            "reward.scorers.0.options.record",
        ),
    ],
)
def test_what_would_be_stored_in_the_clear_is_refused(override, key):
    found = [one for one in problems(override) if "not supported with encryption" in one]
    assert len(found) == 1
    assert f"{key}: " in found[0]
    assert "or remove encryption" in found[0]


@pytest.mark.parametrize("value", ["{}", "{key_file: a, key_env: B}", "{key_env: 'a b'}"])
def test_exactly_one_place_of_the_key_is_named(value):
    with pytest.raises(ConfigError, match="encryption"):
        load_config("quickstart", ["warm_start=null", f"encryption={value}"])


def test_unrecorded_answers_of_external_models_are_accepted():
    options = "{base_url: 'http://a/v1', model: b, rubric: '{{ response }}', record: 'off'}"
    assert problems(f"reward.scorers=[{{kind: llm_judge, options: {options}}}]") == []
