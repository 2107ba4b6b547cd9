"""Settings of the server that `areal-like serve` starts. The module does not import torch, so that the controller can
use it.

The server is rollout/serve.py; controller/cli/serve.py finds the model.
"""

from __future__ import annotations

from typing import Any

import msgspec

from areal_like.settings import DType

UNNAMED_MODEL = "policy"
"""Name of the model in requests that give none."""


class ServeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The policy to serve, and how to serve it.

    folder: temporary folder of the server, removed at the end. model_dir: Hugging Face folder. manifest: manifest of
    its weights as a published version. name: model name for clients. port: 0 for a free one. key: API key of the
    clients; empty: a random one is created. format: format of tool calls; None: detected from the chat template.
    temperature, max_new_tokens: defaults for requests; 0 tokens: as many as fit. num_slots: answers generated at once.
    adapters: folders of adapters (LoRA) by the names under which clients request them. safety: stages that look at
    requests and answers, as in `rollout.safety`.
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
    adapters: dict[str, str] = {}
    safety: tuple[dict[str, Any], ...] = ()
