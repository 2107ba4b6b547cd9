"""Which settings of rollout workers, their engine and devices cannot work. Pure, as run.py is.

Owns: those cross-checks. Refuses: looking at the engine's environment (preflight.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from areal_like.config import BUILT_IN_WORKFLOWS
from areal_like.emulation.machines import gpu_named, model_named
from areal_like.errors import UserError
from areal_like.prompts import PLACEHOLDER
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.config.validation.sglang import option_problems


def engine_problems(config: RunConfig) -> Iterator[Problem]:
    """Contradictions in `rollout.engine`."""
    engine, count = config.rollout.engine, config.rollout.num_workers
    if engine.kind != "sglang":
        if engine.sglang != type(engine.sglang)():  # a resolved config names every key, at its default
            yield Problem(
                ("rollout.engine.sglang", "rollout.engine.kind"),
                f"configures SGLang, but the engine is {engine.kind}",
                "rollout.engine.kind: sglang",
            )
        return
    yield from option_problems(config)
    attach = engine.sglang.attach
    if attach and len(attach) != count:
        yield Problem(
            ("rollout.engine.sglang.attach", "rollout.num_workers"),
            f"names {len(attach)} server{'s' if len(attach) > 1 else ''} for {count} worker{'s' if count > 1 else ''}",
            "one address per worker",
        )
    for index, url in enumerate(attach):
        if not re.fullmatch(r"https?://[^/\s]+(:\d+)?/?", url):
            yield Problem((f"rollout.engine.sglang.attach.{index}",), f"`{url}` is not an address", "http://HOST:PORT")


def emulation_problems(config: RunConfig) -> Iterator[Problem]:
    """What cannot be emulated, and GPUs and models that are not known."""
    emulation = config.emulation
    if emulation is None:
        return
    if config.rollout.engine.kind != "embedded":
        yield Problem(("emulation", "rollout.engine.kind"), "replaces the engine", "rollout.engine.kind: embedded")
    if config.trainer.ranks > 1:
        yield Problem(
            ("trainer.ranks", "emulation"), "one process emulates all of the trainer's GPUs", "emulation.trainer_gpus"
        )
    if config.trainer.loss.kl_coef > 0:
        yield Problem(("trainer.loss.kl_coef", "emulation"), "a reference model cannot be emulated", "kl_coef: 0")
    if config.sampling.forced_lengths is not None:
        yield Problem(
            ("sampling.forced_lengths", "emulation"), "emulated answers already have sampled lengths",
            "emulation.mean_tokens",
        )  # fmt: skip
    for key, name, find in (("gpu", emulation.gpu, gpu_named), ("model", emulation.model, model_named)):
        try:
            find(name, f"emulation.{key}")
        except UserError as error:
            yield Problem((f"emulation.{key}",), error.what, error.remedy or "")


def device_problems(config: RunConfig) -> Iterator[Problem]:
    """Names of devices that are none."""
    devices = {"rollout.engine.device": config.rollout.engine.device, "trainer.device": config.trainer.device}
    if config.warm_start is not None:
        devices["warm_start.sft.device"] = config.warm_start.sft.device
    for key, device in devices.items():
        if not re.fullmatch(r"cpu|cuda|cuda:\d+", device):
            yield Problem((key,), f"no device `{device}`", "cpu, cuda or cuda:N")


def rollout_problems(config: RunConfig) -> Iterator[Problem]:
    """The workflow's name and the prompt's template."""
    workflow = config.rollout.workflow
    if workflow not in BUILT_IN_WORKFLOWS and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", workflow):
        known = f"{', '.join(BUILT_IN_WORKFLOWS)}, or module:Class"
        yield Problem(("rollout.workflow",), f"no workflow `{workflow}`", known)
    if workflow == "single_turn" and not config.reward.scorers and not config.reward.addresses:
        what = "there is none, and the workflow single_turn makes no verdicts"
        yield Problem(("reward.scorers",), what, "name a scorer, or a workflow that makes its own verdicts")
    if workflow == "single_turn" and config.rollout.workflow_options:
        yield Problem(("rollout.workflow_options",), "single_turn takes no options", "remove them, or name a workflow")
    template = config.rollout.prompt_template
    if template is not None and PLACEHOLDER not in template:
        yield Problem(("rollout.prompt_template",), "has no placeholder for the prompt", f"write {PLACEHOLDER} in it")
