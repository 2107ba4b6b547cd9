"""RunConfig: what follows from what, and what a mode decides."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from areal_like.config import StalenessSettings
from areal_like.settings import Settings
from controller.config.offline_config import OfflineConfig
from controller.config.run_config import RunConfig
from rollout.config import EngineSettings, RolloutSettings
from trainer.config import TrainerSettings


def make(**keys: Any) -> RunConfig:
    return RunConfig.model_validate({"data": {"train": {"generator": "running_sum"}}, **keys})


def test_only_the_training_data_must_be_given() -> None:
    with pytest.raises(pydantic.ValidationError, match="train"):
        RunConfig.model_validate({"data": {}})
    assert make().group_size > 1


def test_mode_sets_the_bound_that_was_left_open() -> None:
    assert make(mode="sync").staleness.max_staleness == 0
    assert make(mode="one_step_off").staleness.max_staleness == 1
    assert make(mode="one_step_off").rollout.interruption == "drain"
    assert make(mode="async").staleness.max_staleness == 4
    assert make(mode="sync", staleness={"on_stale": "drop"}).staleness == StalenessSettings(
        max_staleness=0, on_stale="drop"
    )


def test_mode_leaves_what_was_given_for_validate_to_judge() -> None:
    assert make(mode="sync", staleness={"max_staleness": 3}).staleness.max_staleness == 3
    assert make(mode="sync", staleness=StalenessSettings(max_staleness=3)).staleness.max_staleness == 3
    assert make(mode="sync", staleness=StalenessSettings()).staleness.max_staleness == 0


def test_a_resolved_config_resolves_to_itself() -> None:
    for mode in ("async", "sync", "one_step_off"):
        config = make(mode=mode, model={"init": {"model_type": "qwen3"}})
        assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_derived_numbers_follow_their_formulas() -> None:
    config = make(
        groups_per_step=6,
        group_size=4,
        num_steps=10,
        staleness={"max_staleness": 2},
        sampling={"max_new_tokens": 100},
        trainer={"mini_batches": 3},
        rollout={"num_workers": 2, "engine": {"num_slots": 16, "max_context": 160}},
    )
    assert config.samples_per_step == 24
    assert config.num_updates == 30
    assert config.num_groups == 60
    assert config.max_groups_in_flight == 18
    assert config.max_samples_in_flight == 72
    assert config.num_slots == 32
    assert config.worker_capacity == 32
    assert config.max_sampled_tokens_per_step == 2400
    assert config.max_trained_tokens_per_step == 3840


def test_unbounded_has_no_capacity() -> None:
    config = make(staleness={"max_staleness": "unbounded"})
    assert config.max_groups_in_flight is None
    assert config.max_samples_in_flight is None


@pytest.mark.parametrize(
    ("device", "num_workers", "trainer", "expected"),
    [
        ("cpu", 2, "cpu", ("cpu", "cpu")),
        ("cuda", 1, "cuda", ("cuda",)),
        ("cuda", 2, "cuda", ("cuda:1", "cuda:2")),
        ("cuda", 3, "cuda:1", ("cuda:0", "cuda:2", "cuda:3")),
        ("cuda", 2, "cuda:7", ("cuda:0", "cuda:1")),
        ("cuda", 2, "cpu", ("cuda:0", "cuda:1")),
        ("cuda:3", 2, "cpu", ("cuda:3", "cuda:3")),
    ],
)
def test_workers_spread_over_gpus_and_leave_the_trainers_out(
    device: str, num_workers: int, trainer: str, expected: tuple[str, ...]
) -> None:
    config = make(
        rollout=RolloutSettings(num_workers=num_workers, engine=EngineSettings(device=device)),
        trainer=TrainerSettings(device=trainer),
    )
    assert config.rollout_devices == expected


def test_evaluation_samples_greedily_and_as_long_as_training_unless_reported() -> None:
    config = make(sampling={"max_new_tokens": 77, "stop_token_ids": [5]})
    assert (config.eval_sampling.temperature, config.eval_sampling.max_new_tokens) == (0.0, 77)
    assert config.eval_sampling.stop_token_ids == (5,)
    assert make(eval={"max_new_tokens": 9}).eval_sampling.max_new_tokens == 9
    assert config.train_sampling.temperature == 1.0


def test_data_seed_is_the_runs_unless_given() -> None:
    assert make(seed=4).data_seed == 4
    assert make(seed=4, data={"train": {"path": "x"}, "seed": 0}).data_seed == 0
    with pytest.raises(pydantic.ValidationError, match="greater than or equal to 0"):
        make(data={"train": {"path": "x"}, "seed": -1})
    with pytest.raises(pydantic.ValidationError, match="less than 9223372036854775808"):
        make(data={"train": {"path": "x"}, "seed": 2**63})


def test_a_name_may_look_like_a_number() -> None:
    assert make(name=7).name == "7"


def test_every_key_says_what_it_means() -> None:
    from controller.config.schema import knobs

    assert [knob.path for knob in knobs(RunConfig) if not knob.meaning] == []


@pytest.mark.processes
def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, controller.config.loading, controller.preflight.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def sections(model: type[Settings]) -> Iterator[tuple[str, Settings]]:
    """Every section that has a default, at any depth, with the name of its key."""
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True) if not field.is_required() else None
        if isinstance(default, Settings):
            yield f"{model.__name__}.{name}", default
            yield from sections(type(default))


@pytest.mark.parametrize("model", [RunConfig, OfflineConfig])
def test_setting_one_key_of_a_section_keeps_the_defaults_of_its_other_keys(model: type[Settings]) -> None:
    """A default such as `Section(lr=2e-3)` would be replaced by `Section()` as soon as a user sets one key."""
    found = dict(sections(model))
    assert len(found) > 5
    assert [name for name, default in found.items() if default != type(default)()] == []


def test_one_key_of_the_supervised_optimizer_keeps_warm_up_and_schedule() -> None:
    warm_start = {"data": {"generator": "running_sum"}, "sft": {"optimizer": {"lr": 1e-3}}}
    chosen = make(warm_start=warm_start).warm_start
    assert chosen is not None
    optimizer = chosen.sft.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.schedule) == (1e-3, 20, "cosine")
