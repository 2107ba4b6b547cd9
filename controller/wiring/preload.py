"""Modules that are imported once for all processes of a run that are forked. Imports nothing itself."""

from __future__ import annotations

PRELOAD = (
    "torch", "transformers.models.llama.modeling_llama", "trainer.worker", "trainer.sft", "rollout.worker",
    "services.reward.server", "services.reward.standalone",
)  # fmt: skip
"""Modules that they need for any model; importing them starts no thread and uses no device."""
