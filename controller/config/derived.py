"""Numbers that follow from a config, and advice on settings that work but waste resources. Pure.

Contradictions are found in validation/run.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from areal_like.import_path import is_import_path
from controller.config.engines import engine_job, engine_of
from controller.config.memory.estimate import shape_of_run
from controller.config.run_config import RunConfig
from controller.config.stall_limit import longest_recovery, stall_limit_s
from controller.config.trainer_memory import adapter_parameters, outer_share, parameters_of, trainer_state
from controller.config.validation.pool_sizes import gpus_of_run, pool_sizes, units
from controller.run_folder.units import size_text

TOKEN_BYTES = 13
"""Bytes of a token in a segment file: id, log-prob and version of 4 bytes, and whether it is trained on."""
TEXT_BYTES = 4
"""Bytes of text of a sampled token; about as many in most languages and tokenizers."""
SAMPLE_BYTES = 100
"""Bytes of a record without its arrays and text."""


@dataclass(frozen=True)
class Derived:
    """One number that follows from the config, with its formula."""

    name: str
    value: str
    formula: str


def _updates_per_step(config: RunConfig) -> str:
    is_once = config.trainer.passes_per_batch == 1
    return "trainer.mini_batches" if is_once else "trainer.passes_per_batch x trainer.mini_batches"


def _models(config: RunConfig) -> Iterator[Derived]:
    """Models that the workflow calls, and a teacher among them."""
    if models := config.rollout.models:
        roles = {config.trainer.teacher_model: ", the teacher"}
        words = "; ".join(f"{one.name}: {one.words}{roles.get(one.name, '')}" for one in models)
        yield Derived("models called", str(len(models)), words)


def _replay_tokens(config: RunConfig) -> Derived:
    """Size of the tokens that `areal-like replay` needs to start at step 1, and whether they are kept."""
    num_bytes = config.num_steps * (
        config.max_trained_tokens_per_step * TOKEN_BYTES
        + config.max_sampled_tokens_per_step * TEXT_BYTES
        + config.samples_per_step * SAMPLE_BYTES
    )
    keep_mb = config.ledger.keep_mb
    kept = "all tokens are kept" if keep_mb is None else f"ledger.keep_mb keeps {keep_mb:,g} MB, null keeps all tokens"
    how = f"num_steps x (trained tokens x {TOKEN_BYTES} B + sampled tokens x {TEXT_BYTES} B of text); {kept}"
    return Derived("tokens for a replay of all steps", f"<= {size_text(num_bytes)}", how)


def derive(config: RunConfig, *, num_rows: int | None = None, model: dict[str, Any] | None = None) -> list[Derived]:
    """Compute the numbers that a user checks before a run. num_rows: rows of data.train; model: the model's config, if
    known.
    """
    bound = config.staleness.max_staleness
    unbounded = "unbounded"
    found = [
        Derived("steps", f"{config.num_steps:,}", "num_steps"),
        *_models(config),
        Derived("updates", f"{config.num_updates:,}", f"num_steps x {_updates_per_step(config)}"),
        Derived("groups per step", f"{config.groups_per_step:,}", "groups_per_step"),
        Derived("samples per step", f"{config.samples_per_step:,}", "groups_per_step x group_size"),
        Derived(
            "sampled tokens per step", f"<= {config.max_sampled_tokens_per_step:,}", "samples x sampling.max_new_tokens"
        ),
        Derived(
            "trained tokens per step", f"<= {config.max_trained_tokens_per_step:,}", "samples x engine.max_context"
        ),
        Derived("staleness", f"<= {bound}" if bound != unbounded else unbounded, f"mode {config.mode}, staleness"),
        Derived(
            "groups in flight",
            unbounded if config.max_groups_in_flight is None else f"<= {config.max_groups_in_flight:,}",
            "(max_staleness + 1) x groups_per_step: the most that max_staleness allows",
        ),
        Derived(
            "samples in flight",
            unbounded if config.max_samples_in_flight is None else f"<= {config.max_samples_in_flight:,}",
            "(max_staleness + 1) x groups_per_step x group_size",
        ),
        Derived(
            "slots", f"{config.num_slots:,}", "rollout.num_workers x engine.num_slots: answers generated concurrently"
        ),
        Derived(
            "samples held by workers", f"<= {config.rollout.num_workers * config.worker_capacity:,}", "slots + queues"
        ),
        Derived(
            "longest prompt with a full answer", f"{longest_prompt(config):,}", "engine.max_context - max_new_tokens"
        ),
    ]
    found.append(_replay_tokens(config))
    longest = longest_recovery(config)
    found.append(Derived("stall limit", f"{stall_limit_s(config):g} s", f"longest recovery: {longest.longest_s:g} s"))
    cache = kv_cache_bytes(model or config.model.init or {}, config)
    if cache is not None:
        found.append(
            Derived("KV cache per worker", size_text(cache), "2 x layers x kv_heads x head_dim x slots x context")
        )
    parameters = parameters_of(config, model)
    if parameters is not None:
        shape = shape_of_run(config, model)
        state = trainer_state(config, parameters, adapter_parameters(config, shape), outer_share(config, shape))
        place = f"{size_text(state.device_bytes)}" + (
            f" + {size_text(state.host_bytes)} host" if state.host_bytes else ""
        )
        how = "weights, gradients and AdamW; activations and logits need additional memory"
        found.append(Derived("trainer state per rank", place, f"{state.words}: {how}"))
    if num_rows:
        epochs = config.num_groups / num_rows
        found.append(Derived("rows", f"{num_rows:,}", "data.train"))
        found.append(Derived("epochs needed", f"{epochs:.2f}", "num_steps x groups_per_step / rows"))
    for pool in pool_sizes(config):
        size = units(pool.gpus, "GPU") if pool.gpus else units(pool.cpus, "CPU")
        found.append(Derived(f"{pool.name} pool", size, pool.words))
    if num_gpus := gpus_of_run(config):
        how = (
            "the size of the largest pool, because the pools share devices"
            if config.is_colocated
            else "all pools together"
        )
        found.append(Derived("GPUs of the run", f"{num_gpus:g}", how))
    devices = config.rollout_devices
    if len(set(devices)) > 1:
        trainers = config.trainer_devices
        places = f"rollout on {', '.join(devices)}; trainer on {', '.join(trainers)}"
        found.append(Derived("devices", str(len({*devices, *trainers})), places))
    return found


def longest_prompt(config: RunConfig) -> int:
    """Tokens of the longest prompt that leaves room for the longest answer: engine.max_context - max_new_tokens."""
    return config.rollout.engine.max_context - config.sampling.max_new_tokens


def kv_cache_bytes(model: dict[str, Any], config: RunConfig) -> int | None:
    """Bytes of one worker's KV cache for a transformers config; None where its sizes are not given."""
    try:
        heads = int(model["num_attention_heads"])
        head_dim = int(model.get("head_dim") or int(model["hidden_size"]) // heads)
        kv_heads, layers = int(model.get("num_key_value_heads") or heads), int(model["num_hidden_layers"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    engine = config.rollout.engine
    width = 2 if (engine.dtype or config.model.dtype) == "bfloat16" else 4
    return 2 * layers * kv_heads * head_dim * width * engine.num_slots * engine.max_context


SLOW_TOKENS_PER_S = 20.0
"""Slowest rate that is still usual for one answer, with many at once or on a CPU."""


def _length_advice(config: RunConfig) -> Iterator[str]:
    """Advice on settings that lose long answers more often than short ones."""
    if config.staleness.over_age.loses_slow_groups:
        yield (
            f"staleness.on_stale: {config.staleness.on_stale} loses the groups that take longest, so training uses"
            " shorter answers than the policy generates: in a simulated run, 22 % shorter on average and 56 % at the "
            "99th percentile (docs/staleness.md; see `lengths` in the summary of a run); with `wait` no group is lost"
        )
    timeout_s, longest = config.staleness.group_timeout_s, config.sampling.max_new_tokens
    if longest / timeout_s > SLOW_TOKENS_PER_S:
        yield (
            f"staleness.group_timeout_s: {longest:,} tokens in {timeout_s:g} s need {longest / timeout_s:,.0f} tokens/s"
            " per answer; slower groups are dropped, so training uses shorter answers than the policy generates"
        )


def _teacher_advice(config: RunConfig) -> Iterator[str]:
    """Advice on a teacher that has a cache for answers but never answers, because no workflow of the user calls it."""
    for model in config.rollout.models:
        slots = model.num_slots or config.rollout.engine.num_slots
        if model.name == config.trainer.teacher_model and slots > 1 and not is_import_path(config.rollout.workflow):
            yield (
                f"rollout.models: the teacher `{model.name}` generates no answers, so its cache for {slots} answers "
                "stays empty; set num_slots: 1"
            )


def advise(config: RunConfig, num_rows: int | None = None) -> list[str]:
    """Sentences about settings that work but waste resources."""
    advice = []
    in_flight = config.max_samples_in_flight
    if in_flight is not None and config.num_slots > in_flight:
        advice.append(
            f"rollout.engine.num_slots: {config.num_slots} slots, but max_staleness allows at most {in_flight} samples "
            "in flight, so the other slots stay empty"
        )
    if config.group_size > config.worker_capacity:
        advice.append(
            f"group_size: a worker holds {config.worker_capacity} samples, fewer than a group of {config.group_size}, "
            "so groups are split and their prompts are prefilled more than once"
        )
    if config.groups_per_step % config.trainer.mini_batches:
        advice.append(
            f"trainer.mini_batches: {config.groups_per_step} groups are divided into {config.trainer.mini_batches} "
            "mini-batches of unequal size"
        )
    shares = config.trainer.ranks * config.trainer.mini_batches
    if config.trainer.ranks > 1 and shares > config.samples_per_step:
        advice.append(
            f"trainer.ranks: {config.samples_per_step} samples are fewer than {config.trainer.mini_batches}"
            f" mini-batches x {config.trainer.ranks} ranks, so some ranks have no samples to process"
        )
    if not config.staleness.over_age.is_strict and config.staleness.max_staleness != "unbounded":
        advice.append(
            f"staleness.on_stale: {config.staleness.on_stale} limits only admission, so groups can be used even if "
            "they exceed max_staleness"
        )
    advice += _length_advice(config)
    draws = None if num_rows is None or config.data.epochs is None else num_rows * config.data.epochs
    if draws is not None and draws < config.num_groups:
        advice.append(
            f"data.epochs: {num_rows} rows x {config.data.epochs} epochs give {draws} groups, but num_steps x "
            f"groups_per_step requires {config.num_groups}, so the run ends after about"
            f" {draws // config.groups_per_step} steps"
        )
    advice += _teacher_advice(config)
    advice += engine_of(config).advice(engine_job(config))
    if not config.data.eval_sources:
        advice.append("data.eval is not set, so the summary has no accuracy")
    return advice
