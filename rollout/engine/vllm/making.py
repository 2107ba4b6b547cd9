"""Creates the vLLM engine of a worker. Imports torch."""

from __future__ import annotations

from rollout.engine.descriptor import EngineContext
from rollout.engine.server.process import ServerSetup
from rollout.engine.vllm.engine import VLLMEngine


def make(context: EngineContext) -> VLLMEngine:
    """Create the engine."""
    return VLLMEngine(
        context.model_dir,
        context.settings,
        dtype=context.dtype,
        num_threads=context.num_threads,
        interruption=context.interruption,
        setup=ServerSetup(
            context.worker,
            context.log_dir / f"{context.worker}-vllm.log",
            context.seed + context.index,
            port=context.settings.vllm.port_of(context.index),
            start_timeout_s=context.startup_timeout_s,
        ),
        tracer=context.tracer,
        report=context.report,
    )
