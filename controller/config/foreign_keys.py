"""Keys of other systems and their equivalents here: TRL, verl, AReaL, OpenRLHF, slime, NeMo-RL, prime-rl.

The table is used for "did you mean" messages about keys of other systems, and says how their values must be changed.
docs/coming-from.md has the same by system, with differences in behaviour. Misspelt names of our own keys are handled in
problems.py.

A name is looked up with as many of its sections as the table has: `actor_rollout_ref.rollout.n` as `rollout.n`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Equivalent(NamedTuple):
    """Our keys for a key of another system, and how to change the value if it is not the same."""

    keys: tuple[str, ...]
    note: str = ""


_TOKENS = "in tokens: the budget of a packed micro-batch, which holds the longest sequence"
_COUNT = "the number of updates in a step, not their size"
_CONTEXT = "prompt plus answer, in tokens"
_SCORERS = 'reward.scorers=[{kind: "module:function"}]'
_PROMPTS = "it counts prompts"

_TABLE: Mapping[str, tuple[str, ...] | tuple[tuple[str, ...], str]] = {
    # model and data
    "model.path": ("pretrain", "hf_checkpoint", "model_name_or_path", "policy.model_name", "actor.path"),
    "data.train.path": ("train_files", "prompt_data", "train_dataset.path"),
    "data.train.dataset": ("train_dataset", "dataset_name"),
    "data.eval.path": ("val_files", "eval_dataset"),
    "data.train.columns": (("input_key", "label_key", "prompt_key"), "a mapping: {prompt: your column, answer: ...}"),
    "data.epochs": ("total_epochs", "total_train_epochs", "num_train_epochs", "num_episodes"),
    # batches
    "groups_per_step": (
        ("train_batch_size", "train_dataset.batch_size", "rollout_batch_size", "num_prompts_per_step", "batch_size",
         "orchestrator.batch_size", "generation_batch_size"), _PROMPTS,
    ),
    "group_size": ("rollout.n", "rollout_n", "n_samples", "num_generations", "n_samples_per_prompt",
                   "num_generations_per_prompt", "rollouts_per_example", "orchestrator.group_size"),
    "num_steps": ("total_training_steps", "total_steps", "max_steps", "num_rollout", "max_num_steps"),
    "trainer.mini_batches": (
        ("ppo_mini_batch_size", "ppo_n_minibatches", "steps_per_generation", "gradient_accumulation_steps",
         "num_steps_per_rollout", "global_batch_size", "train_global_batch_size"), _COUNT,
    ),
    "trainer.micro_batch_tokens": (
        ("ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", "max_tokens_per_mb", "max_tokens_per_gpu",
         "per_device_train_batch_size", "micro_train_batch_size", "train_micro_batch_size", "micro_batch_size",
         "train_max_tokens_per_gpu"), _TOKENS,
    ),
    "trainer.sequence_parallel": ("ulysses_sequence_parallel_size", "context_parallel_size", "ring_attn_size"),
    "trainer.fsdp.replicas": ("dp_replicate",),
    "filter_zero_signal": ("filter_groups.enable", "filter_groups", "dynamic_sampling", "use_dynamic_sampling",
                           "dynamic_filtering"),
    # sampling
    "sampling.max_new_tokens": ("max_response_length", "max_completion_length", "rollout_max_response_len",
                                "max_completion_tokens", "generate_max_len", "max_tokens", "max_response_len"),
    "sampling.temperature": ("rollout_temperature", "rollout.temperature"),
    "rollout.engine.max_context": (
        ("max_prompt_length", "prompt_max_len", "max_total_sequence_length", "rollout_max_context_len", "seq_len",
         "max_model_len"), _CONTEXT,
    ),
    # optimizer and loss
    "trainer.optimizer.lr": ("learning_rate", "actor_lr", "actor_learning_rate", "optim.lr", "optimizer.lr"),
    "trainer.optimizer.weight_decay": ("l2",),
    "trainer.optimizer.max_grad_norm": ("max_norm", "grad_clip", "clip_grad"),
    "trainer.loss.eps_low": ("clip_ratio_low", "ratio_clip_min", "epsilon"),
    "trainer.loss.eps_high": ("clip_ratio_high", "ratio_clip_max", "eps_clip_higher", "eps_clip_high", "epsilon_high"),
    "trainer.loss.dual_clip": ("clip_ratio_c", "c_clip", "eps_clip_c", "ratio_clip_c", "delta"),
    "trainer.loss.kl_coef": ("beta", "kl_loss_coef", "use_kl_loss", "init_kl_coef", "kl_ctl",
                             "reference_policy_kl_penalty"),
    "trainer.loss.entropy_coef": ("entropy_coeff", "entropy_loss_coef"),
    "trainer.loss.aggregation": (
        ("loss_agg_mode", "loss_type", "token_level_loss"),
        "token_mean, sequence_mean, group_mean or constant; dr_grpo is constant with constant_divisor;"
        " cispo, sapo and vespo are trainer.loss.kind",
    ),
    "trainer.loss.kind": (
        ("loss_mode", "importance_sampling_level", "use_sapo_loss"),
        "gspo, cispo, sapo and others: docs/algorithms.md",
    ),
    "trainer.loss.corrections": (
        ("off_policy_mask_threshold", "mask_truncated_completions", "m2_threshold", "rollout_rs", "opsm_delta",
         "use_opsm", "rollout_token_veto_threshold"), "a list of masks and weights: docs/algorithms.md",
    ),
    "trainer.version_logprobs": ("old_logits", "recompute_old_logprobs", "keep_old_actor"),
    "trainer.loss.kl_in": ("use_kl_in_reward",),
    "trainer.loss.kl_estimator": (
        ("kl_loss_type", "kl_penalty", "kl_estimator"), "k1, k2 or k3, which is low_var_kl elsewhere",
    ),
    "trainer.loss.proximal": ("use_decoupled_loss", "prox_logp_method", "bypass_mode"),
    "trainer.loss.weight.mode": ("rollout_is", "use_tis", "vllm_importance_sampling_mode", "rejection_sampling",
                                 "use_importance_sampling_correction", "enable_vllm_is_correction"),
    "trainer.loss.weight.max": ("rollout_is_threshold", "tis_clip", "vllm_importance_sampling_cap",
                                "vllm_is_truncated_threshold", "behav_imp_weight_cap"),
    "trainer.advantage.kind": (
        ("adv_estimator", "advantage_estimator", "norm_adv_by_std_in_grpo", "no_advantage_std_norm", "scale_rewards",
         "reward_norm", "adv_norm"), "grpo, grpo_no_std, rloo, lite_ppo and others: docs/algorithms.md",
    ),
    "trainer.advantage.reward_scale": ("reward_scaling",),
    "trainer.lora.rank": ("lora_rank", "peft_config.r", "lora.rank", "lora_r"),
    "trainer.lora.alpha": ("lora_alpha",),
    "trainer.lora.targets": ("target_modules", "lora_target_modules"),
    "trainer.critic.optimizer.lr": ("critic.optim.lr", "critic.optimizer.lr", "critic_learning_rate", "critic_lr"),
    "trainer.critic.value_clip": ("cliprange_value", "vf_clip"),
    "trainer.critic.warmup_steps": ("critic_warmup", "freezing_actor_steps"),
    "trainer.advantage.options": (("gae_lambda",), "{gae_lambda: ...} with kind: gae"),
    "trainer.advantage.reward_clip": ("reward_clip_range",),
    # staleness and mode
    "staleness.max_staleness": ("max_head_offpolicyness", "max_off_policy_steps", "max_trajectory_age_steps", "eta",
                                "max_staleness_steps", "max_async_level", "async_queue_size"),
    "staleness.on_stale": ("max_off_policy_strategy",),
    "mode": ("trainer_mode", "async_train"),
    # rewards, workflows
    "reward.scorers": (
        ("custom_reward_function", "reward_funcs", "reward_weights", "custom_rm_path", "remote_rm_url", "rm_type"),
        _SCORERS,
    ),
    "rollout.workflow": ("agent_func_path", "custom_generate_function_path"),
    # machines
    "rollout.num_workers": ("gpus", "vllm_num_engines", "rollout_num_engines"),
    "rollout.engine.num_slots": ("max_concurrent_rollouts", "max_num_seqs"),
    "rollout.engine.sglang.tp_size": ("tensor_model_parallel_size", "vllm_tensor_parallel_size",
                                      "rollout_num_gpus_per_engine"),
    "rollout.engine.sglang.memory_fraction": ("gpu_memory_utilization", "vllm_gpu_memory_utilization",
                                              "sglang_mem_fraction_static"),
    "trainer.attention": ("attn_implementation",),
    "trainer.deepspeed.stage": ("zero_stage",),
    "trainer.deepspeed.offload_optimizer": ("adam_offload",),
    # logging and saving
    "eval.every_steps": ("test_freq", "eval_steps", "eval_interval", "val_period", "evaluator.freq_steps"),
    "trainer.checkpoint.every_steps": ("save_freq", "save_steps", "save_interval", "recover.freq_steps", "save_period"),
    "metrics": ("report_to", "stats_logger", "use_wandb", "use_tensorboard"),
    "runs_dir": ("output_dir", "save_path", "ckpt_path"),
}  # fmt: skip
"""Other systems' names by our keys, with a note if the value is not the same."""

_OF_SEVERAL: Mapping[str, Equivalent] = {
    "clip_ratio": Equivalent(("trainer.loss.eps_low", "trainer.loss.eps_high")),
    "clip_range": Equivalent(("trainer.loss.eps_low", "trainer.loss.eps_high")),
    "eps_clip": Equivalent(("trainer.loss.eps_low", "trainer.loss.eps_high")),
    "eps_clip_low_high": Equivalent(("trainer.loss.eps_low", "trainer.loss.eps_high")),
    "batch_size": Equivalent(("groups_per_step", "warm_start.sft.batch_size"), _PROMPTS),
    "n_gpus_per_node": Equivalent(("rollout.num_workers", "trainer.ranks")),
    "max_off_policy_threshold": Equivalent(
        ("staleness.max_staleness",), "set a value lower by 1: verl counts 1 for a sample of the current policy"
    ),
}


def _equivalents() -> Iterator[tuple[str, Equivalent]]:
    for ours, names in _TABLE.items():
        note = names[1] if isinstance(names[0], tuple) else ""
        for name in names[0] if isinstance(names[0], tuple) else names:
            yield str(name), Equivalent((ours,), str(note))
    yield from _OF_SEVERAL.items()


EQUIVALENTS: Mapping[str, Equivalent] = dict(_equivalents())


def equivalent_of(path: str) -> Equivalent | None:
    """Our equivalent of another system's key; None if there is none. Case and dashes are ignored."""
    parts = path.lower().replace("-", "_").split(".")
    for begin in range(len(parts)):
        if (found := EQUIVALENTS.get(".".join(parts[begin:]))) is not None:
            return found
    return None


def leaves_of(path: str, value: Any) -> list[str]:
    """The keys below an unknown section, as full paths down to the first that is in the table; otherwise the path
    itself.
    """
    if not isinstance(value, Mapping) or not value or equivalent_of(path) is not None:
        return [path]
    return [leaf for key, inner in value.items() for leaf in leaves_of(f"{path}.{key}", inner)]
