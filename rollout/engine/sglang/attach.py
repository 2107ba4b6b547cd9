"""Attaches to a server that others run: checks that it is compatible and has the model that is trained.

The server is not changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_like.errors import UserError, first_line
from rollout.config import EngineSettings, Interruption, SGLangSettings
from rollout.engine.server.http import ServerGone, ServerRefused
from rollout.engine.sglang.client import SGLangClient
from rollout.engine.sglang.environment import KNOWN_VERSION

WHERE = "rollout.engine.sglang.attach"
SHAPE_KEYS = (
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings", "num_experts",
    "num_experts_per_tok", "rope_theta",
)  # fmt: skip
"""Keys that must be equal in two config.json files for the weights of one to fit the other."""


async def check_attached(
    url: str,
    settings: EngineSettings,
    interruption: Interruption,
    model_dir: Path,
    context: int,
    key: str | None = None,
) -> None:
    """Raise UserError if the server cannot be reached, has another version, or has another model."""
    client = SGLangClient(
        url,
        control_timeout_s=settings.sglang.control_timeout_s,
        load_timeout_s=settings.sglang.load_timeout_s,
        key=key,
    )
    try:
        model, server = await client.model_info(), await client.server_info()
    except (ServerGone, ServerRefused) as error:
        what = f"the SGLang server at {url} cannot be used ({first_line(error)})"
        raise UserError(what, where=WHERE, remedy=f"start the server, or remove {WHERE}") from error
    finally:
        await client.close()
    check_server(url, server, interruption, context)
    check_model(url, model, model_dir)


def read_key(settings: SGLangSettings) -> str | None:
    """The key that attached servers require; None: none. Raises UserError."""
    if settings.attach_key_file is None:
        return None
    path = Path(settings.attach_key_file).expanduser()
    try:
        key = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})", where=f"{WHERE}_key_file") from error
    if not key or not key.isascii() or not key.isprintable():
        remedy = "write the value of the server's --api-key into this file, on a single line"
        raise UserError(f"{path} does not contain a single valid API key", where=f"{WHERE}_key_file", remedy=remedy)
    return key


def check_server(url: str, server: Mapping[str, Any], interruption: Interruption, context: int) -> None:
    """Raise UserError for an incompatible version or incompatible options."""
    version = str(server.get("version", "of unknown version"))
    if version != KNOWN_VERSION:
        raise UserError(
            f"the server at {url} runs SGLang {version}, but {KNOWN_VERSION} is required",
            where=WHERE,
            remedy=f"start a server of version {KNOWN_VERSION}",
        )
    if interruption == "keep_kv" and not server.get("disable_overlap_schedule"):
        raise UserError(
            f"keep_kv requires the server at {url} to run with --disable-overlap-schedule, because with the overlap "
            "scheduler the policy version of one token per answer is unknown",
            where=WHERE,
            remedy="start the server with --disable-overlap-schedule, or set rollout.interruption: recompute",
        )
    length = server.get("context_length")
    if isinstance(length, int) and length < context:
        raise UserError(
            f"the server at {url} has a context of {length} tokens, but rollout.engine.max_context is {context}",
            where=WHERE,
            remedy=f"set rollout.engine.max_context: {length}, or start the server with a larger --context-length",
        )


def check_model(url: str, model: Mapping[str, Any], model_dir: Path) -> None:
    """Raise UserError if the server's model does not have the shape of the one in `model_dir`."""
    path = Path(str(model.get("model_path", "")))
    ours = _config_of(model_dir)
    theirs: Mapping[str, Any] = _config_of(path) if (path / "config.json").is_file() else model
    for key in SHAPE_KEYS:
        if key in ours and theirs.get(key) is not None and theirs[key] != ours[key]:
            raise UserError(
                f"the server at {url} has a different model ({path}): the value of {key} is {theirs[key]}, expected "
                f"{ours[key]}",
                where=WHERE,
                remedy="start the server with the model in model.path",
            )


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} has no readable config.json ({error})", where=WHERE) from error
    return config if isinstance(config, dict) else {}
