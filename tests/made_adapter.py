"""Adapters in peft's format as far as their settings and headers say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from areal_like.weights.adapter import part_names

UP = "model.layers.0.mlp.up_proj"
SETTINGS = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none", "modules_to_save": None, "rank_pattern": {}}


def adapter_in(folder: Path, *, modules: dict[str, tuple[int, int]] | None = None, **settings: Any) -> Path:
    """An adapter as far as headers say. modules: inputs and outputs."""
    folder.mkdir()
    rank = 2
    shapes: dict[str, list[int]] = {}
    for module, (inputs, outputs) in ({UP: (4, 6)} if modules is None else modules).items():
        first, second = part_names(module)
        shapes |= {first: [rank, inputs], second: [outputs, rank]}
    return written(folder, shapes, **settings)


def written(folder: Path, shapes: dict[str, list[int]], **settings: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file = folder / "adapter_model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * end)
    return folder
