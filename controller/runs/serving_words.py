"""Commands that serve an exported folder with SGLang, vLLM and llama.cpp. They are printed, never run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

ADAPTER_FILE = "adapter_config.json"


def serving_words(folder: Path) -> list[str]:
    """One line per program. For an adapter they also name its base model."""
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
    return [
        f"SGLang:     python -m sglang.launch_server --model-path {place}",
        f"vLLM:       vllm serve {place}",
        f"llama.cpp:  python convert_hf_to_gguf.py {place} --outfile {gguf}, then llama-server -m {gguf}",
    ]


def _base_of(folder: Path) -> str | None:
    """The base model of an adapter; None for a complete model."""
    try:
        found = json.loads((folder / ADAPTER_FILE).read_text()).get("base_model_name_or_path")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError):
        found = None
    return found if isinstance(found, str) and found else "BASE"
