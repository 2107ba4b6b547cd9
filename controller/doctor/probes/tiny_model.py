"""Prints whether transformers can make and run a Qwen3 from a config, which the quickstart requires.

Runs one forward pass of a model of a few thousand parameters, without files, downloads or GPUs.
"""

from __future__ import annotations

import importlib
import json
from typing import Any


def main() -> None:
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(
        "qwen3", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.inference_mode():
        logits = model(torch.arange(8).reshape(1, 8), use_cache=False).logits
    facts = {"version": transformers.__version__, "is_finite": bool(torch.isfinite(logits).all())}
    print("areal_like-doctor " + json.dumps(facts), flush=True)


main()
