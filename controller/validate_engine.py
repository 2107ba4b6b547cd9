"""Which settings of engine and devices cannot work. Pure, as validate.py is.

Owns: those cross-checks. Refuses: looking at the engine's environment (preflight.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from controller.config import RunConfig
from controller.config_problems import Problem


def engine_problems(config: RunConfig) -> Iterator[Problem]:
    """Contradictions in `rollout.engine`."""
    engine, count = config.rollout.engine, config.rollout.num_workers
    if engine.kind != "sglang":
        if engine.sglang.model_fields_set:
            yield Problem(
                ("rollout.engine.sglang", "rollout.engine.kind"),
                f"says how SGLang runs, and the engine is {engine.kind}",
                "rollout.engine.kind: sglang",
            )
        return
    attach = engine.sglang.attach
    if attach and len(attach) != count:
        yield Problem(
            ("rollout.engine.sglang.attach", "rollout.num_workers"),
            f"names {len(attach)} server{'s' if len(attach) > 1 else ''} for {count} worker{'s' if count > 1 else ''}",
            "one address per worker",
        )
    for index, url in enumerate(attach):
        if not re.fullmatch(r"https?://[^/\s]+(:\d+)?/?", url):
            yield Problem((f"rollout.engine.sglang.attach.{index}",), f"`{url}` is no address", "http://HOST:PORT")


def device_problems(config: RunConfig) -> Iterator[Problem]:
    """Names of devices that are none."""
    devices = {"rollout.engine.device": config.rollout.engine.device, "trainer.device": config.trainer.device}
    if config.warm_start is not None:
        devices["warm_start.sft.device"] = config.warm_start.sft.device
    for key, device in devices.items():
        if not re.fullmatch(r"cpu|cuda|cuda:\d+", device):
            yield Problem((key,), f"no device `{device}`", "cpu, cuda or cuda:N")
