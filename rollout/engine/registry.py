"""The built-in engines by `rollout.engine.kind`. Does not import torch: only its worker imports an engine.

A new engine needs one line in ENGINES.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal_like.import_path import find_named, import_factory
from rollout.engine.descriptor import KIND_KEY, EngineContext, EngineDescriptor
from rollout.engine.embedded_descriptor import EMBEDDED
from rollout.engine.emulated_descriptor import EMULATED
from rollout.engine.port import Engine
from rollout.engine.sglang.descriptor import SGLANG
from rollout.engine.vllm.descriptor import VLLM

ENGINES: Mapping[str, EngineDescriptor] = {
    engine.name: engine
    for engine in (
        EMBEDDED,
        SGLANG,
        VLLM,
    )
}
"""Descriptors by `rollout.engine.kind`."""


def find_engine(kind: str, *, is_emulated: bool = False) -> EngineDescriptor:
    """Find the engine of that kind, or the emulated engine in a run with emulated devices.

    Args:
        kind: a key of ENGINES, or the import path of a user's descriptor.
        is_emulated: the run has the section `emulation`.

    Raises:
        UserError: there is no such engine.

    Example:
        >>> find_engine("sglang").title
        'SGLang'
    """
    if is_emulated:
        return EMULATED
    return find_named(kind, ENGINES, EngineDescriptor, noun="engine", where=KIND_KEY)


def make_engine(descriptor: EngineDescriptor, context: EngineContext) -> Engine:
    """Create the engine of one worker. Raises UserError."""
    engine: Engine = import_factory(descriptor.factory, KIND_KEY)(context)
    return engine
