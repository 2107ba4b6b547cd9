"""What descriptors of engines with servers share; `rollout.engine.KIND` has their settings. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.setting_problem import Recovery
from rollout.config import EngineSettings

MAX_TP_SIZE = 64


def settings_with_more_gpus(kind: str, engine: EngineSettings) -> Iterator[tuple[str, EngineSettings]]:
    """Settings with more GPUs per worker, with the line of configuration that chooses them."""
    own = getattr(engine, kind)
    size = own.tp_size * 2
    while size <= MAX_TP_SIZE:
        larger = own.model_copy(update={"tp_size": size})
        yield f"rollout.engine.{kind}.tp_size: {size}", engine.model_copy(update={kind: larger})
        size *= 2


def server_recoveries(kind: str, server: str, engine: EngineSettings, start_s: float) -> Iterator[Recovery]:
    """Recoveries from servers that hang: they are replaced. server: `an SGLang server`. start_s: time of a start."""
    own, key = getattr(engine, kind), f"rollout.engine.{kind}"
    yield Recovery(
        f"{server} that hangs during generation is replaced",
        (f"{key}.stall_timeout_s", "launch.startup_timeout_s"),
        own.stall_timeout_s + start_s,
    )
    yield Recovery(
        f"{server} that hangs while loading weights is replaced by one that loads them again",
        (f"{key}.load_timeout_s", "launch.startup_timeout_s"),
        2 * own.load_timeout_s + start_s,
    )
