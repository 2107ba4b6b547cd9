"""Cross-checks of rollout workers, their engine and devices. Pure, like run.py.

The engine's environment is checked in preflight/.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.device_names import NAMES, is_device
from areal_like.emulation.machines import gpu_named, model_named
from areal_like.errors import UserError
from areal_like.import_path import is_import_path
from areal_like.prompts import PLACEHOLDER
from controller.config.engines import REGISTERED, as_problems, configured_engine, engine_job, model_problems
from controller.config.problems import Problem
from controller.config.run_config import BUILT_IN_WORKFLOWS, RunConfig
from controller.config.validation.objectives import is_corrected


def engine_problems(config: RunConfig) -> Iterator[Problem]:
    """Contradictions in `rollout.engine`, and between the engine and the rest of the run."""
    settings, engine, job = config.rollout.engine, configured_engine(config), engine_job(config)
    for other in REGISTERED.values():
        section = getattr(settings, other.section) if other.section and other.section != engine.section else None
        if section is not None and section != type(section)():  # a resolved config lists every key, also defaults
            yield Problem(
                (f"rollout.engine.{other.section}", "rollout.engine.kind"),
                f"this section applies to {other.title}, but rollout.engine.kind is {settings.kind}",
                f"set rollout.engine.kind: {other.name}",
            )
    yield from as_problems(engine.option_problems(settings.options))
    yield from as_problems(engine.setting_problems(job))
    if config.model.init is not None:
        yield from model_problems(config, config.model.init)
    if job.interruption not in engine.interruptions:
        yield Problem(
            ("rollout.interruption", "rollout.engine.kind"),
            f"{engine.title} does not support `{job.interruption}`",
            f"use {' or '.join(engine.interruptions)}",
        )
    yield from _rounding(config)
    yield from _stop_strings(config)


def _stop_strings(config: RunConfig) -> Iterator[Problem]:
    """What cannot end answers at texts."""
    engine, stop = configured_engine(config), "sampling.stop"
    if not config.sampling.stop:
        return
    if problem := engine.stop_string_problem(config.rollout.engine):
        yield Problem((stop, "rollout.engine.kind"), problem, "use sampling.stop_token_ids instead")
    if config.rollout.workflow == "tools":
        what = "in the workflow `tools`, only the model ends a turn"
        yield Problem((stop, "rollout.workflow"), what, "set sampling.stop: []")
    if config.sampling.forced_lengths is not None:
        what = "with forced lengths, answers do not end at stop strings"
        yield Problem((stop, "sampling.forced_lengths"), what, "set sampling.stop: []")


def _rounding(config: RunConfig) -> Iterator[Problem]:
    """Check for a correction if the engine computes with lower precision than the trainer: its policy then differs from
    the trained one.
    """
    loss, key = config.trainer.loss, configured_engine(config).rounding_key(config.rollout.engine)
    if key and not is_corrected(config):
        yield Problem(
            ("trainer.loss.weight.mode" if loss.weight.mode == "off" else "trainer.loss.proximal", key),
            "this setting does not correct for the rounding differences between the engine and the trainer",
            "set trainer.loss.proximal: recompute and trainer.loss.weight.mode: truncate",
        )


def emulation_problems(config: RunConfig) -> Iterator[Problem]:
    """Settings that cannot be emulated, and unknown GPUs and models."""
    emulation = config.emulation
    if emulation is None:
        return
    if not configured_engine(config).can_be_emulated:
        names = [name for name, engine in REGISTERED.items() if engine.can_be_emulated]
        remedy = f"set rollout.engine.kind to {' or '.join(names)}"
        yield Problem(
            ("emulation", "rollout.engine.kind"), f"the engine {config.rollout.engine.kind} cannot be emulated", remedy
        )
    if config.trainer.ranks > 1:
        yield Problem(
            ("trainer.ranks", "emulation"),
            "a single process emulates all GPUs of the trainer",
            "set trainer.ranks: 1, and set emulation.trainer_gpus to the number of GPUs",
        )
    if config.trainer.loss.kl_coef > 0:
        yield Problem(
            ("trainer.loss.kl_coef", "emulation"), "emulated devices cannot run a reference model", "set kl_coef: 0"
        )
    if config.sampling.forced_lengths is not None:
        yield Problem(
            ("sampling.forced_lengths", "emulation"),
            "forced answer lengths have no effect on emulated devices, which sample lengths from `emulation`",
            "set emulation.mean_tokens instead",
        )  # fmt: skip
    for key, name, find in (("gpu", emulation.gpu, gpu_named), ("model", emulation.model, model_named)):
        try:
            find(name, f"emulation.{key}")
        except UserError as error:
            yield Problem((f"emulation.{key}",), error.what, error.remedy or "")


def device_problems(config: RunConfig) -> Iterator[Problem]:
    """Invalid device names."""
    devices = {"rollout.engine.device": config.rollout.engine.device, "trainer.device": config.trainer.device}
    if config.warm_start is not None:
        devices["warm_start.sft.device"] = config.warm_start.sft.device
    for key, device in devices.items():
        if not is_device(device):
            yield Problem((key,), f"there is no device `{device}`", NAMES)


def hardware_problems(config: RunConfig) -> Iterator[Problem]:
    """An unknown kind of GPU."""
    if config.hardware.gpu is None:
        return
    try:
        gpu_named(config.hardware.gpu, "hardware.gpu")
    except UserError as error:
        yield Problem(("hardware.gpu",), error.what, error.remedy or "")


TAKES_TURNS = {"environment": "{kind: module:Class}", "tools": "{kind: tools, options: {tools: [module:FUNCTION]}}"}
"""Workflows that require an environment, and how to configure one."""


def _tool_problems(config: RunConfig) -> Iterator[Problem]:
    """Settings that conflict with the workflow `tools`."""
    if config.rollout.prompt_template is not None:
        what = "the workflow `tools` declares its tools in the chat template, which this setting replaces"
        yield Problem(("rollout.prompt_template",), what, "remove this setting")
    environment = config.reward.environment
    if environment is None:
        return
    timeout_s, num_bytes = environment.call_timeout_s, environment.max_turn_bytes
    if timeout_s is not None and timeout_s >= environment.step_timeout_s:
        yield Problem(
            ("reward.environment.options.call_timeout_s", "reward.environment.step_timeout_s"),
            f"call_timeout_s ({timeout_s:g} s) must be less than step_timeout_s ({environment.step_timeout_s:g} s), "
            "the time limit of the whole step",
            "reduce call_timeout_s, or increase step_timeout_s",
        )
    if num_bytes is not None and num_bytes > environment.max_observation_kb << 10:
        yield Problem(
            ("reward.environment.options.max_result_chars", "reward.environment.max_observation_kb"),
            f"the results of max_calls calls may take {-(-num_bytes // 1024)} kB, but an observation is limited to "
            f"{environment.max_observation_kb} kB",
            "reduce max_calls or max_result_chars, or increase max_observation_kb",
        )


def _agent_problems(config: RunConfig) -> Iterator[Problem]:
    """Settings that the workflow `agent` requires."""
    if "command" not in config.rollout.workflow_options:
        yield Problem(
            ("rollout.workflow_options",),
            "the workflow `agent` requires the command that starts the agent",
            "set, for example, command: [python, agent.py]",
        )
    is_judged = config.rollout.workflow_options.get("reward", "scorer") == "scorer"
    if is_judged and not config.reward.scorers and not config.reward.addresses:
        what = "the workflow `agent` gets rewards from scorers, but none is configured"
        yield Problem(
            ("reward.scorers",), what, "configure a scorer, or set workflow_options: {reward: agent} or {reward: exit}"
        )
    if config.rollout.prompt_template is not None:
        what = "the workflow `agent` formats messages with the chat template, which this setting replaces"
        yield Problem(("rollout.prompt_template",), what, "remove this setting")


def _traffic_problems(config: RunConfig) -> Iterator[Problem]:
    """Settings that the workflow `traffic` requires, or that have no effect with it."""
    port, key = config.rollout.workflow_options.get("port"), "rollout.workflow_options.port"
    if port is None:
        yield Problem(
            ("rollout.workflow_options",),
            "the workflow `traffic` requires a port for clients",
            "set, for example, port: 8001",
        )
    elif isinstance(port, int) and port + config.rollout.num_workers > 65536:
        last = port + config.rollout.num_workers - 1
        what = f"each worker needs its own port, so the last port would be {last}, but the maximum is 65535"
        yield Problem((key, "rollout.num_workers"), what, "set a lower port")
    if config.group_size != 1:
        what = f"each conversation takes place only once, so there cannot be {config.group_size} samples of it"
        yield Problem(("group_size", "rollout.workflow"), what, "set group_size: 1")
    if config.data.train.generator != "traffic":
        what = "this section has no effect with the workflow `traffic`, because clients write the messages"
        yield Problem(("data.train", "rollout.workflow"), what, "set data.train: {generator: traffic}")
    for name, is_given, remedy in (
        ("data.eval", bool(config.data.eval_sources), "remove this setting"),
        ("data.mix", bool(config.data.mix), "remove this setting"),
        ("reward.scorers", bool(config.reward.scorers), "set reward.scorers: []"),
        ("reward.environment", config.reward.environment is not None, "remove this setting"),
    ):
        if is_given:
            what = "this setting has no effect with the workflow `traffic`, because prompts and rewards "
            "come from clients"
            yield Problem((name, "rollout.workflow"), what, remedy)
    if config.rollout.safety:
        what = "the workflow `traffic` answers clients directly, so safety stages cannot block or mask answers"
        yield Problem(("rollout.safety", "rollout.workflow"), what, "remove this setting")
    if not isinstance(config.reward.on_failure, str):
        used = "rollout.workflow_options.on_missing_reward"
        what = f"with the workflow `traffic`, {used} determines what happens to conversations without a reward"
        yield Problem(("reward.on_failure", "rollout.workflow"), what, f"remove this setting, and set {used}")
    if config.rollout.prompt_template is not None:
        what = "the workflow `traffic` formats messages with the chat template, which this setting replaces"
        yield Problem(("rollout.prompt_template",), what, "remove this setting")


def rollout_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of the workflow and of the prompt's template."""
    workflow = config.rollout.workflow
    if workflow not in BUILT_IN_WORKFLOWS and not is_import_path(workflow):
        known = f"{', '.join(BUILT_IN_WORKFLOWS)}, or module:Class"
        yield Problem(("rollout.workflow",), f"there is no workflow `{workflow}`", f"use one of {known}")
    if workflow in ("single_turn", "tools") and not config.reward.scorers and not config.reward.addresses:
        what = f"the workflow `{workflow}` gets verdicts from scorers, but none is configured"
        yield Problem(("reward.scorers",), what, "configure a scorer, or use a workflow that returns its own verdicts")
    if workflow == "agent":
        yield from _agent_problems(config)
    if workflow == "traffic":
        yield from _traffic_problems(config)
    elif config.data.train.generator == "traffic":
        what = "the generator `traffic` produces rows without content, which only the workflow `traffic` can use"
        remedy = "set rollout.workflow: traffic, or choose a different source of rows"
        yield Problem(("data.train.generator", "rollout.workflow"), what, remedy)
    if workflow in TAKES_TURNS and config.reward.environment is None and not config.reward.addresses:
        what = f"the workflow `{workflow}` requires an environment, but none is configured"
        yield Problem(("reward.environment",), what, f"set reward.environment: {TAKES_TURNS[workflow]}")
    if workflow == "tools":
        yield from _tool_problems(config)
    if workflow == "environment" and config.reward.scorers and not config.reward.addresses:
        what = "the workflow `environment` gets its verdict from the environment and does not use scorers"
        yield Problem(("reward.scorers", "rollout.workflow"), what, "set reward.scorers: []")
    if (environment := config.reward.environment) is not None:
        longest_s = (environment.retries + 1) * environment.step_timeout_s
        if longest_s >= config.rollout.score_timeout_s:
            yield Problem(
                ("reward.environment.step_timeout_s", "rollout.score_timeout_s"),
                f"an environment step that hangs takes up to {longest_s:g} s including retries, but workers wait only "
                f"{config.rollout.score_timeout_s:g} s for a reply",
                "reduce step_timeout_s, or increase score_timeout_s",
            )
    if workflow == "single_turn" and config.reward.environment is not None:
        what = "the workflow `single_turn` does not use an environment"
        yield Problem(("rollout.workflow", "reward.environment"), what, "set rollout.workflow: environment")
    if workflow == "single_turn" and config.rollout.workflow_options:
        yield Problem(
            ("rollout.workflow_options",),
            "the workflow `single_turn` has no options",
            "remove the options, or choose a different workflow",
        )
    template = config.rollout.prompt_template
    if template is not None and PLACEHOLDER not in template:
        yield Problem(
            ("rollout.prompt_template",),
            "the template contains no placeholder for the prompt",
            f"add {PLACEHOLDER} to the template",
        )
