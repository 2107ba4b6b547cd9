"""What the server of `areal-like serve` is started with. Torch-free, so that the controller can write it.

Owns: `ServeOrder`. Refuses: serving (rollout/serve.py), finding the model (controller/cli/serve.py).
"""

from __future__ import annotations

import msgspec

from areal_like.settings import DType


class ServeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One policy, and where it is served.

    folder: of everything below, removed at the end. model_dir: in the form of Hugging Face. manifest: of its weights
    as a published version. name: as clients see the model. port: 0 takes a free one. key: of the clients; empty: a
    random one is made. format: of tool calls; None: as the chat template shows it. temperature, max_new_tokens: of
    requests that do not say; 0 tokens: as many as fit. num_slots: answers at once.
    """

    folder: str
    model_dir: str
    manifest: str
    name: str
    host: str
    port: int
    key: str
    format: str | None
    temperature: float
    max_new_tokens: int
    max_context: int
    num_slots: int
    device: str
    dtype: DType
    num_threads: int
