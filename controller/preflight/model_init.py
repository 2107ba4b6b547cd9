"""Checks of `model.init` that do not require importing transformers: the model type and positive sizes.

The model type is looked up in the source text of the installed transformers. All other errors are reported by the
preparation of the model, which uses the architecture's config class.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from controller.config.problems import Problem

COUNT = re.compile(r"(num|n)_\w+|\w+_(size|dim)|max_position_embeddings")
MAY_BE_ZERO = re.compile(r"num_(experts|shared_experts|local_experts|nextn)\w*|\w+_experts\w*|\w*window\w*")
_TABLE = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\(\n(.*?)^\)", re.MULTILINE | re.DOTALL)


def problems_of(init: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems below `model.init`."""
    known, model_type = causal_types(), init.get("model_type")
    if isinstance(model_type, str) and known and model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else "use a causal language model, e.g. qwen3"
        what = f"the installed transformers has no causal language model of type `{model_type}`"
        yield Problem(("model.init.model_type",), what, remedy)
    for key, value in init.items():
        if not COUNT.fullmatch(key) or isinstance(value, bool) or not isinstance(value, int | float | str):
            continue
        least = 0 if MAY_BE_ZERO.fullmatch(key) else 1
        if not isinstance(value, int) or value < least:
            yield Problem((f"model.init.{key}",), f"the value must be a whole number of at least {least}, not {value}")


def causal_types() -> list[str]:
    """Model types of the installed transformers with a causal language model; none where that cannot be read."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return []
    try:
        text = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text()
    except OSError:
        return []
    table = _TABLE.search(text)
    return sorted(set(re.findall(r'^\s*\("([^"]+)",', table[1], re.MULTILINE))) if table else []
