"""Creates the SGLang engine of a worker, over a launched or an attached server. Imports torch."""

from __future__ import annotations

from areal_like.errors import UserError
from rollout.engine.descriptor import EngineContext
from rollout.engine.server.engine import served
from rollout.engine.sglang.engine import SGLangEngine


def make(context: EngineContext) -> SGLangEngine:
    """Create the engine. Raises UserError if there are fewer servers to attach to than workers."""
    sglang = context.settings.sglang
    if sglang.attach and context.index >= len(sglang.attach):
        raise UserError(
            f"no server address is listed for {context.worker}",
            where="rollout.engine.sglang.attach",
            remedy="list one server address per worker",
        )
    return SGLangEngine(
        context.model_dir,
        context.settings,
        attach=sglang.attach[context.index] if sglang.attach else None,
        starts_empty=context.starts_empty,
        **served(context, "sglang", sglang.port_of(context.index)),
    )
