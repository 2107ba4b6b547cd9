"""Creates the vLLM engine of a worker. Imports torch."""

from __future__ import annotations

from rollout.engine.descriptor import EngineContext
from rollout.engine.server.engine import served
from rollout.engine.vllm.engine import VLLMEngine


def make(context: EngineContext) -> VLLMEngine:
    """Create the engine."""
    port = context.settings.vllm.port_of(context.index)
    return VLLMEngine(context.model_dir, context.settings, **served(context, "vllm", port))
