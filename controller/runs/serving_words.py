"""Commands that serve an exported folder with SGLang, vLLM and llama.cpp. They are printed, never run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

ADAPTER_FILE = "adapter_config.json"
TEMPLATE_FILE = "chat_template.jinja"


def serving_words(folder: Path) -> list[str]:
    """One line per program. For an adapter they also name its base model.

    SGLang and vLLM round a float32 model to 16 bits by default, and would answer differently from the policy
    that was trained.
    """
    place, name = shlex.quote(str(folder)), shlex.quote(folder.name)
    gguf = shlex.quote(f"{folder.name}.gguf")
    base = _base_of(folder)
    if base is not None:
        model = shlex.quote(base)
        return [
            f"SGLang:     python -m sglang.launch_server --model-path {model} --lora-paths {name}={place}",
            f"vLLM:       vllm serve {model} --enable-lora --lora-modules {name}={place}",
            f"llama.cpp:  python convert_lora_to_gguf.py {place} --base {model} --outfile {gguf}, then "
            f"llama-server -m BASE.gguf --lora {gguf}",
        ]
    config = _fields(folder / "config.json")
    exact = " --dtype float32" if config.get("dtype", config.get("torch_dtype")) == "float32" else ""
    lines = [
        f"SGLang:     python -m sglang.launch_server --model-path {place}{exact}",
        f"vLLM:       vllm serve {place}{exact}",
        f"llama.cpp:  python convert_hf_to_gguf.py {place} --outfile {gguf}, then llama-server -m {gguf}",
    ]
    has_template = (folder / TEMPLATE_FILE).exists() or "chat_template" in _fields(folder / "tokenizer_config.json")
    return lines if has_template else [*lines, "It has no chat template: ask for /v1/completions, not for chat."]


def _base_of(folder: Path) -> str | None:
    """The base model of an adapter; None for a complete model."""
    if not (folder / ADAPTER_FILE).exists():
        return None
    found = _fields(folder / ADAPTER_FILE).get("base_model_name_or_path")
    return found if isinstance(found, str) and found else "BASE"


def _fields(file: Path) -> dict[str, Any]:
    """Content of a JSON file; empty if it is missing, or no JSON object."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
