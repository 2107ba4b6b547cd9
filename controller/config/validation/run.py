"""Cross-checks of a configuration. Pure: no files, no sockets.

Each check says why a combination cannot work and what to do instead. Single values are checked by pydantic, the machine
in preflight/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from areal_like import limits
from areal_like.config import BUILT_IN_TOKENIZERS, ModelSettings
from areal_like.context_limit import context_limit
from areal_like.device_names import names_cpu, names_gpu
from areal_like.import_path import is_import_path
from areal_like.staleness import MODE_STALENESS, OVER_AGE, bound_of
from controller.config.backends import backend_kind_problems
from controller.config.engines import engine_kind_problems
from controller.config.launchers import launcher_kind_problems, launcher_of
from controller.config.problems import Problem, nearest, show
from controller.config.run_config import (
    SCORERS,
    RunConfig,
    contradictions,
    soft_zones,
)
from controller.config.stall_limit import stall_problems
from controller.config.validation.data import data_problems
from controller.config.validation.encryption import encryption_problems
from controller.config.validation.engine import (
    device_problems,
    emulation_problems,
    engine_problems,
    hardware_problems,
    rollout_problems,
)
from controller.config.validation.evaluations import evaluation_problems
from controller.config.validation.launcher import launcher_problems
from controller.config.validation.lora import lora_problems
from controller.config.validation.models import called_model_problems
from controller.config.validation.objectives import advantage_problems, critic_problems, loss_problems
from controller.config.validation.pool_sizes import placement_problems, pool_problems
from controller.config.validation.teacher import teacher_problems
from controller.config.validation.trainer_backend import backend_problems
from controller.config.validation.weight_transfer import transfer_kind_problems, transfer_problems
from controller.run_folder.run_folder import NAME_REMEDY, is_run_name
from controller.run_folder.units import size_text


def unknown_kinds(config: RunConfig) -> list[Problem]:
    """Names of unknown implementations."""
    return [
        *engine_kind_problems(config),
        *launcher_kind_problems(config),
        *transfer_kind_problems(config),
        *backend_kind_problems(config),
    ]


def cross_check(config: RunConfig) -> list[Problem]:
    """Every contradiction in a config, without checking the machine. If it names an unknown implementation, only that
    is returned: the other checks depend on it.
    """
    problems = unknown_kinds(config)
    if problems:
        return problems
    for check in (
        _model,
        data_problems,
        evaluation_problems,
        _mode,
        advantage_problems,
        teacher_problems,
        _groups,
        _replay_buffer,
        _samples_in_flight,
        _sampling,
        _context,
        loss_problems,
        critic_problems,
        lora_problems,
        backend_problems,
        _reward,
        device_problems,
        hardware_problems,
        rollout_problems,
        called_model_problems,
        engine_problems,
        emulation_problems,
        _launch,
        launcher_problems,
        _swap,
        _autoscale,
        transfer_problems,
        pool_problems,
        placement_problems,
        _metrics,
        _callbacks,
        encryption_problems,
    ):
        problems += check(config)
    return problems


def model_problems(model: ModelSettings) -> Iterator[Problem]:
    """A starting model that is missing, or given twice."""
    if (model.path is None) == (model.init is None):
        what = "neither model.path nor model.init is given"
        if model.path is not None:
            what = "model.path and model.init are mutually exclusive"
        yield Problem(
            ("model", "model.path", "model.init"),
            what,
            "set model.path to a Hugging Face model folder or Hub name, or model.init to a model config",
        )
        return
    if model.init is not None:
        if not isinstance(model.init.get("model_type"), str):
            yield Problem(
                ("model.init",),
                "the config must contain `model_type`",
                "set, for example, {model_type: qwen3, hidden_size: 128, ...}",
            )
        if model.tokenizer == "from_model":
            yield Problem(
                ("model.tokenizer", "model.init"),
                "a model created from model.init has no tokenizer",
                f"set model.tokenizer to a tokenizer folder, or to {' or '.join(BUILT_IN_TOKENIZERS)}",
            )
    if model.path == "":
        yield Problem(("model.path",), "the value is empty", "specify a Hugging Face model folder or Hub name")
    if model.tokenizer.startswith("characters:") and model.tokenizer not in BUILT_IN_TOKENIZERS:
        yield Problem(
            ("model.tokenizer",),
            f"there is no built-in tokenizer `{model.tokenizer}`",
            f"use {' or '.join(BUILT_IN_TOKENIZERS)}",
        )


def _model(config: RunConfig) -> Iterator[Problem]:
    yield from model_problems(config.model)
    kernel = config.trainer.attention
    if kernel in ("flash_attn", "varlen") and not names_gpu(config.trainer.device):
        yield Problem(
            ("trainer.attention", "trainer.device"),
            f"`{kernel}` requires CUDA, but trainer.device is {config.trainer.device}",
            "set trainer.attention: auto",
        )


def _mode(config: RunConfig) -> Iterator[Problem]:
    bound = config.staleness.max_staleness
    if config.mode in MODE_STALENESS and bound != MODE_STALENESS[config.mode]:
        wanted = MODE_STALENESS[config.mode]
        yield Problem(
            ("staleness.max_staleness", "mode"),
            f"mode {config.mode} requires a staleness bound of {wanted}, not {bound}",
            f"remove max_staleness or set it to {wanted}, or use mode: async",
        )
    elif bound == "unbounded" and config.staleness.over_age.is_strict:
        yield Problem(
            ("staleness.on_stale", "staleness.max_staleness"),
            f"`{config.staleness.on_stale}` handles groups that exceed the staleness bound, but "
            "`max_staleness: unbounded` sets no bound",
            "set on_stale: keep, or set max_staleness to a number",
        )
    if config.mode == "one_step_off" and config.rollout.interruption != "drain":
        yield Problem(
            ("rollout.interruption", "mode"),
            "mode one_step_off generates each batch with a single version, so answers are never interrupted",
            "remove interruption or set it to drain, or use mode: async",
        )


def _groups(config: RunConfig) -> Iterator[Problem]:
    if config.group_size == 1 and config.filter_zero_signal:
        yield Problem(
            ("filter_zero_signal", "group_size"),
            "all rewards in a group of one sample are equal, so every group would be filtered",
            "set group_size to 2 or more, or filter_zero_signal: false",
        )
    if (dynamic := config.dynamic_batch) is not None:
        if not config.filter_zero_signal:
            what = "without filter_zero_signal no group is filtered, so a step never needs further attempts"
            yield Problem(("dynamic_batch", "filter_zero_signal"), what, "set filter_zero_signal: true")
        if dynamic.max_attempts < config.groups_per_step:
            what = (
                f"a step has {config.groups_per_step} groups, which need at least as many attempts, not "
                f"{dynamic.max_attempts}"
            )
            yield Problem(
                ("dynamic_batch.max_attempts", "groups_per_step"), what,
                f"set max_attempts to {config.groups_per_step} or more"
            )  # fmt: skip
        if dynamic.min_groups > config.groups_per_step:
            what = f"a step uses at most {config.groups_per_step} groups, fewer than {dynamic.min_groups}"
            yield Problem(
                ("dynamic_batch.min_groups", "groups_per_step"),
                what,
                f"set min_groups to at most {config.groups_per_step}",
            )
    if config.trainer.mini_batches > config.groups_per_step:
        yield Problem(
            ("trainer.mini_batches", "groups_per_step"),
            f"{config.groups_per_step} groups cannot be divided into {config.trainer.mini_batches} mini-batches",
            f"set mini_batches to at most {config.groups_per_step}",
        )


def _replay_buffer(config: RunConfig) -> Iterator[Problem]:
    """Check that reused groups are within the staleness bound."""
    bound, buffer = bound_of(config.mode, config.staleness.bound), config.replay_buffer
    if buffer is None or bound is None or not OVER_AGE[config.staleness.on_stale].is_strict or buffer.max_age <= bound:
        return
    key, remedy = "staleness.max_staleness", f"set max_staleness to {buffer.max_age} or more"
    if config.mode != "async":
        key, remedy = "mode", f"set mode: async, and {remedy}"
    elif bound:
        remedy = f"set max_age to at most {bound}, or {remedy}"
    what = f"reused groups may be {buffer.max_age} versions old, but the staleness bound is {bound}"
    yield Problem(("replay_buffer.max_age", key), what, remedy)


def _samples_in_flight(config: RunConfig) -> Iterator[Problem]:
    """Check the number of samples in flight: the controller keeps the state of every sample of the admitted groups."""
    samples = config.max_samples_in_flight or config.samples_per_step
    if samples <= limits.SAMPLES_IN_FLIGHT:
        return
    keys = ("groups_per_step", "group_size", "staleness.max_staleness")
    formula = "groups_per_step * group_size"
    if config.max_samples_in_flight is not None:
        formula = f"(max_staleness + 1) * {formula}"
    yield Problem(
        keys,
        f"{formula} allows {samples:,} samples in flight; their state alone, without tokens, requires at least "
        f"{size_text(samples * limits.SAMPLE_BYTES)} of memory in the controller",
        f"reduce one of {', '.join(keys)}, so that at most {limits.SAMPLES_IN_FLIGHT:,} samples are in flight",
    )


def _sampling(config: RunConfig) -> Iterator[Problem]:
    why = (
        "log-probs are computed for the full distribution, so sampling from a truncated one would give wrong "
        "importance ratios"
    )
    if config.sampling.top_p < 1:
        yield Problem(("sampling.top_p",), f"training requires top_p 1: {why}", "set top_p: 1 (eval.top_p may differ)")
    if config.sampling.top_k > 0:
        yield Problem(("sampling.top_k",), f"training requires top_k 0: {why}", "set top_k: 0 (eval.top_k may differ)")


def _context(config: RunConfig) -> Iterator[Problem]:
    context = config.rollout.engine.max_context
    for key, length in (
        ("sampling.max_new_tokens", config.sampling.max_new_tokens),
        ("eval.max_new_tokens", config.eval.max_new_tokens or 0),
    ):
        if length >= context:
            yield Problem(
                (key, "rollout.engine.max_context"),
                f"{length} answer tokens leave no room for a prompt in a context of {context} tokens",
                f"set this key to at most {context - 1}, or increase rollout.engine.max_context",
            )
    if config.trainer.micro_batch_tokens < context:
        yield Problem(
            ("trainer.micro_batch_tokens", "rollout.engine.max_context"),
            f"a sequence of up to {context} tokens must fit in one micro-batch of {config.trainer.micro_batch_tokens} "
            "tokens",
            f"set micro_batch_tokens to at least {context}",
        )
    limit = context_limit(config.model.init or {})
    if limit is not None and (excess := limit.excess(context)):
        yield Problem(("rollout.engine.max_context", "model.init"), excess, limit.remedy)
    if config.warm_start is not None:
        sft = config.warm_start.sft
        if sft.micro_batch_tokens < sft.max_tokens:
            yield Problem(
                ("warm_start.sft.micro_batch_tokens", "warm_start.sft.max_tokens"),
                f"a sequence of up to {sft.max_tokens} tokens must fit in one micro-batch of {sft.micro_batch_tokens} "
                "tokens",
                f"set micro_batch_tokens to at least {sft.max_tokens}",
            )


def _reward(config: RunConfig) -> Iterator[Problem]:
    for index, scorer in enumerate(config.reward.scorers):
        if scorer.kind not in SCORERS and not is_import_path(scorer.kind):
            near = nearest(scorer.kind, SCORERS, count=1)
            remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(SCORERS)}, or module:function"
            yield Problem((f"reward.scorers.{index}.kind",), f"there is no scorer `{scorer.kind}`", remedy)
        if scorer.held_out and (scorer.weight != 0 or scorer.gate is not None):
            what = "be part of the reward" if scorer.weight != 0 else "have a gate"
            remedy = "set weight: 0" if scorer.weight != 0 else "remove gate"
            keys = tuple(f"reward.scorers.{index}.{name}" for name in ("held_out", "gate" if scorer.gate else "weight"))
            yield Problem(keys, f"a scorer with `held_out: true` cannot {what}", f"{remedy}, or remove held_out")
    for key, what, remedy in contradictions(config.reward):
        yield Problem((f"reward.{key}",), what, remedy)
    longest = config.sampling.max_new_tokens
    for where, zone_begins in soft_zones(config.reward):
        if zone_begins >= longest:
            keys = (f"reward.{where}.options.max_tokens", "sampling.max_new_tokens")
            what = f"the length penalty begins at {zone_begins} tokens, but no answer has more than {longest} tokens"
            yield Problem(keys, what, f"set max_tokens: {longest}")
    if config.reward.scorers and all(scorer.weight == 0 for scorer in config.reward.scorers):
        yield Problem(
            ("reward.scorers",),
            "every scorer has weight 0, so all rewards would be equal",
            "set the weight of at least one scorer to a different value",
        )


def _launch(config: RunConfig) -> Iterator[Problem]:
    launch = config.launch
    yield from stall_problems(config)
    for key in ("silence_s", "controller_silence_s"):
        limit_s = getattr(launch, key)
        if limit_s >= 4 * launch.heartbeat_s:
            continue
        yield Problem(
            (f"launch.{key}", "launch.heartbeat_s"),
            f"{limit_s:g} s is less than four heartbeat intervals of {launch.heartbeat_s:g} s, so every process would "
            "be considered lost",
            f"set this key to at least {4 * launch.heartbeat_s:g}",
        )
    name = config.name
    if not is_run_name(name):
        yield Problem(("name",), f"{show(name)} is not a valid folder name", NAME_REMEDY)


def _autoscale(config: RunConfig) -> Iterator[Problem]:
    scale, num_workers = config.rollout.autoscale, config.rollout.num_workers
    if scale is None:
        return
    if not scale.min_workers <= num_workers <= scale.max_workers:
        yield Problem(
            ("rollout.autoscale", "rollout.num_workers"),
            f"the run starts with {num_workers} workers, which is not between min_workers ({scale.min_workers}) and "
            f"max_workers ({scale.max_workers})",
            "change rollout.num_workers, or the limits",
        )
    if config.is_colocated:
        yield Problem(
            ("rollout.autoscale", "placement"),
            "engines and trainer share their devices (placement: colocated), so their number cannot change",
            "remove rollout.autoscale, or use separate devices",
        )
    has_gpus = not all(names_cpu(device) for device in config.rollout_devices)
    if has_gpus and launcher_of(config).is_one_machine and scale.max_workers > num_workers:
        yield Problem(
            ("rollout.autoscale.max_workers", "rollout.num_workers"),
            f"on one machine, a worker beyond the {num_workers} of rollout.num_workers would share a GPU with another",
            f"set max_workers to {num_workers}, or use launch.kind: ray",
        )


def _swap(config: RunConfig) -> Iterator[Problem]:
    if config.trainer.weights.swap == "rolling" and config.rollout.interruption == "drain":
        yield Problem(
            ("trainer.weights.swap", "rollout.interruption"),
            "with `interruption: drain`, each worker finishes its answers before it loads a version, so in a rolling "
            "swap the last worker would wait for all others",
            "set swap: together, or set interruption to recompute or keep_kv",
        )


def _callbacks(config: RunConfig) -> Iterator[Problem]:
    for index, name in enumerate(config.callbacks):
        if not is_import_path(name):
            yield Problem((f"callbacks.{index}",), f"`{name}` is not an import path", "use the form module:CLASS")


def _metrics(config: RunConfig) -> Iterator[Problem]:
    metrics, launch = config.metrics, config.launch
    if metrics.tensorboard == "":
        yield Problem(("metrics.tensorboard",), "the value is empty", "set this key to true, or to a folder")
    endpoint = metrics.prometheus
    if endpoint is not None and endpoint.port and endpoint.port == launch.port:
        yield Problem(
            ("metrics.prometheus.port", "launch.port"),
            f"the metrics and the run's processes cannot share port {launch.port}",
            "use a different port, or 0 for any free port",
        )


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None
