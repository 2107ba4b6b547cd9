"""Names of other systems' keys are refused with ours for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.config.foreign_keys import EQUIVALENTS, equivalent_of
from controller.config.loading import load_config
from controller.config.problems import ConfigError
from controller.config.run_config import RunConfig
from controller.config.schema import field_at

TYPED = {
    # verl
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.n": "group_size",
    "actor_rollout_ref.actor.optim.lr": "trainer.optimizer.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "trainer.mini_batches",
    "actor_rollout_ref.actor.clip_ratio_high": "trainer.loss.eps_high",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.engine.sglang.tp_size",
    "data.train_batch_size": "groups_per_step",
    "data.max_response_length": "sampling.max_new_tokens",
    "algorithm.adv_estimator": "trainer.advantage.kind",
    "algorithm.kl_ctrl.kl_coef": "trainer.loss.kl_coef",
    "trainer.total_training_steps": "num_steps",
    "trainer.test_freq": "eval.every_steps",
    "trainer.v1.sampler.max_off_policy_threshold": "staleness.max_staleness",
    # AReaL
    "gconfig.n_samples": "group_size",
    "gconfig.temperature": "sampling.temperature",
    "actor.optimizer.lr": "trainer.optimizer.lr",
    "actor.eps_clip": "trainer.loss.eps_low",
    "actor.gradient_checkpointing": "trainer.gradient_checkpointing",
    "rollout.max_head_offpolicyness": "staleness.max_staleness",
    "total_train_epochs": "data.epochs",
    # TRL
    "num_generations": "group_size",
    "max_completion_length": "sampling.max_new_tokens",
    "per_device_train_batch_size": "trainer.micro_batch_tokens",
    "gradient_accumulation_steps": "trainer.mini_batches",
    "scale_rewards": "trainer.advantage.kind",
    "loss_type": "trainer.loss.aggregation",
    "epsilon": "trainer.loss.eps_low",
    "reward_funcs": "reward.scorers",
    # OpenRLHF
    "pretrain": "model.path",
    "actor_learning_rate": "trainer.optimizer.lr",
    "micro_train_batch_size": "trainer.micro_batch_tokens",
    "init_kl_coef": "trainer.loss.kl_coef",
    "generate_max_len": "sampling.max_new_tokens",
    # slime
    "--rollout-batch-size": "groups_per_step",
    "--n-samples-per-prompt": "group_size",
    "--num-rollout": "num_steps",
    "--rollout-max-response-len": "sampling.max_new_tokens",
    # NeMo-RL
    "grpo.num_prompts_per_step": "groups_per_step",
    "grpo.max_num_steps": "num_steps",
    "loss_fn.ratio_clip_min": "trainer.loss.eps_low",
    "grpo.async_grpo.max_trajectory_age_steps": "staleness.max_staleness",
    # prime-rl
    "orchestrator.batch_size": "groups_per_step",
    "orchestrator.max_off_policy_steps": "staleness.max_staleness",
    "trainer.optim.lr": "trainer.optimizer.lr",
}


def complaints(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(("typed", "ours"), TYPED.items())
def test_another_systems_key_is_answered_with_ours(typed: str, ours: str) -> None:
    (complaint,) = complaints(f"{typed}=1")
    assert complaint.startswith(f"command line: {typed.removeprefix('--')}: no such key")
    assert complaint.partition("did you mean ")[2].startswith(ours), complaint


def test_a_whole_section_of_another_system_is_answered_key_by_key(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "model: {init: {model_type: qwen3}, tokenizer: bytes}\ndata: {train: {generator: running_sum}}\n"
        "actor_rollout_ref:\n  rollout: {n: 8, nonsense: 1}\n  actor:\n    optim: {lr: 1.0e-6}\n    clip_ratio: 0.2\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(job))
    found = {line.split(": ")[1]: line for line in str(caught.value).splitlines()}
    assert "group_size" in found["actor_rollout_ref.rollout.n"]
    assert "job.yaml:6" in found["actor_rollout_ref.actor.optim.lr"]
    assert "eps_low or trainer.loss.eps_high" in found["actor_rollout_ref.actor.clip_ratio"]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "the number of updates in a step"),
        ("max_off_policy_threshold", "set a value lower by 1"),
        ("loss_type", "constant with constant_divisor"),
    ],
)
def test_a_value_that_means_something_else_is_explained(typed: str, words: str) -> None:
    assert words in complaints(f"{typed}=8")[0]


@pytest.mark.parametrize("typed", ["gamma", "algorithm.gamma", "lora_dropout", "use_liger_kernel"])
def test_what_has_no_equivalent_is_not_answered_with_a_guess(typed: str) -> None:
    assert "did you mean" not in complaints(f"{typed}=1")[0]


@pytest.mark.parametrize("name", sorted(EQUIVALENTS))
def test_every_answer_is_a_key_and_no_name_is_one_of_ours(name: str) -> None:
    for key in EQUIVALENTS[name].keys:
        assert field_at(RunConfig, tuple(key.split("."))) is not None, key
    assert field_at(RunConfig, tuple(name.split("."))) is None


def test_case_and_dashes_do_not_count() -> None:
    assert equivalent_of("Rollout-Batch-Size") == equivalent_of("rollout_batch_size") is not None
