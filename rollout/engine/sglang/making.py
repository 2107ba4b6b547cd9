"""Creates the SGLang engine of a worker, over a launched or an attached server. Imports torch."""

from __future__ import annotations

from areal_like.errors import UserError
from rollout.engine.descriptor import EngineContext
from rollout.engine.server.process import ServerSetup
from rollout.engine.sglang.engine import SGLangEngine


def make(context: EngineContext) -> SGLangEngine:
    """Create the engine. Raises UserError if there are fewer servers to attach to than workers."""
    sglang = context.settings.sglang
    if sglang.attach and context.index >= len(sglang.attach):
        raise UserError(f"{context.worker} has no server to attach to", where="rollout.engine.sglang.attach")
    return SGLangEngine(
        context.model_dir,
        context.settings,
        dtype=context.dtype,
        num_threads=context.num_threads,
        interruption=context.interruption,
        setup=ServerSetup(
            context.worker,
            context.log_dir / f"{context.worker}-sglang.log",
            context.seed + context.index,
            port=sglang.port_of(context.index),
            start_timeout_s=context.startup_timeout_s,
        ),
        attach=sglang.attach[context.index] if sglang.attach else None,
        tracer=context.tracer,
        report=context.report,
        starts_empty=context.starts_empty,
    )
