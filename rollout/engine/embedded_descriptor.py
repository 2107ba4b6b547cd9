"""What the rest of the program must know of the embedded engine.

Owns: the answers of `EngineDescriptor` for it. Refuses: torch.
"""

from __future__ import annotations

from rollout.engine.descriptor import EngineDescriptor


class EmbeddedDescriptor(EngineDescriptor):
    """Generates inside the worker's process; needs nothing besides it."""

    name = "embedded"
    title = "the embedded engine"
    factory = "rollout.engine.embedded:make"
    joins_process_groups = True
    releases_memory = True
    can_be_emulated = True


EMBEDDED = EmbeddedDescriptor()
