"""Claims about the look at `model.init`: what cannot be is found without importing transformers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from controller.config.loading import load_config
from controller.preflight.model_init import problems_of


@pytest.mark.parametrize(
    ("init", "key", "words"),
    [
        ({"model_type": "qwen33"}, "model_type", "of type `qwen33`"),
        ({"model_type": "qwen3", "hidden_size": -5}, "hidden_size", "at least 1, not -5"),
        ({"model_type": "qwen3", "num_hidden_layers": 0}, "num_hidden_layers", "at least 1, not 0"),
        ({"model_type": "qwen3", "head_dim": 1.5}, "head_dim", "a whole number"),
        ({"model_type": "gpt2", "n_embd": "many"}, "n_embd", "a whole number"),
    ],
)
def test_setting_that_cannot_be_is_named(init: dict[str, Any], key: str, words: str) -> None:
    (problem,) = problems_of(init)
    assert problem.keys == (f"model.init.{key}",)
    assert words in problem.what


def test_unknown_type_is_answered_with_the_nearest() -> None:
    (problem,) = problems_of({"model_type": "qwen33"})
    assert "qwen3" in problem.remedy


@pytest.mark.parametrize("init", [
    {"model_type": "qwen3", "sliding_window": 0, "use_cache": False, "layer_types": ["full_attention"]},
    {"model_type": "qwen3_moe", "num_experts": 0, "head_dim": None},
])  # fmt: skip
def test_settings_that_may_be_are_let_pass(init: dict[str, Any]) -> None:
    assert list(problems_of(init)) == []


@pytest.mark.processes
def test_types_are_read_without_importing_transformers() -> None:
    """In a process of its own: other tests import them here."""
    looked = "from controller.preflight.model_init import causal_types; import sys; types = causal_types()"
    said = f"{looked}; print('transformers' in sys.modules, 'torch' in sys.modules, *types)"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=300, check=True)
    imported, torch_imported, *types = done.stdout.split()
    assert (imported, torch_imported) == ("False", "False")
    assert {"qwen2", "qwen3", "llama", "gpt2"} <= set(types)


@pytest.mark.parametrize("name", ["quickstart"])
def test_recipe_that_makes_its_model_has_no_problem(name: str) -> None:
    assert list(problems_of(load_config(name, []).config.model.init or {})) == []
