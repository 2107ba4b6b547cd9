"""Which adapters in peft's format can be used, on which bases, and what is said of the others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from made_adapter import UP, adapter_in, written

from areal_like.errors import UserError
from areal_like.weights.adapter import part_names
from areal_like.weights.adapter_folder import AdapterFolder, base_problem, read_adapter


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_adapter(folder)
    return str(caught.value)


@pytest.mark.parametrize(("settings", "scale"), [({}, 4.0), ({"use_rslora": True}, 8 / math.sqrt(2))])
def test_an_adapter_has_a_scale_and_the_sizes_of_its_modules(
    tmp_path: Path, settings: dict[str, Any], scale: float
) -> None:
    found = read_adapter(adapter_in(tmp_path / "a", **settings))
    assert (found.rank, found.scale, found.shapes) == (2, scale, {UP: (4, 6)})
    assert found.file.is_file()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is LOHA, but only LORA is supported"),
        (
            {"use_dora": True},
            "use_dora is true, which is not supported -> merge the adapter into its base model with peft",
        ),
        ({"bias": "all"}, 'bias is "all", which is not supported'),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save is ["lm_head"], which is not supported'),
        ({"rank_pattern": {"q": 3}}, 'rank_pattern is {"q": 3}, which is not supported'),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa", which changes the base'),
        ({"r": 0}, "r must be an integer from 1 to 1048576, not 0"),
        ({"r": 10**400}, "r must be an integer from 1 to 1048576"),
        (
            {"r": 3},
            "the matrices A and B of model.layers.0.mlp.up_proj have the shapes [2, 4] and [6, 2], which do not fit "
            "rank 3",
        ),
        ({"lora_alpha": "much"}, "lora_alpha must be a finite number, not much"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a finite number, not 1000000"),
        ({"lora_alpha": -math.inf}, "lora_alpha must be a finite number, not -inf"),
        ({"lora_alpha": math.nan}, "lora_alpha must be a finite number, not nan"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused_with_its_key(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    assert words in refused(adapter_in(tmp_path / "a", **settings))


def test_folders_that_hold_no_adapter_are_refused(tmp_path: Path) -> None:
    assert "none: no such folder -> specify the folder of an adapter" in refused(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "empty: the folder has no adapter_config.json" in refused(tmp_path / "empty")
    folder = adapter_in(tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(b"short")
    assert "the file is not a complete safetensors file" in refused(folder)
    (folder / "adapter_model.safetensors").unlink()
    assert "a: the folder has no adapter_model.safetensors" in refused(folder)
    (folder / "adapter_config.json").write_text("[")
    assert "adapter_config.json: the file cannot be read as JSON (Expecting value" in refused(folder)
    (folder / "adapter_config.json").write_text("[]")
    assert "adapter_config.json: the file is not a JSON object" in refused(folder)
    (folder / "adapter_config.json").write_text("[" * 100_000)
    assert "adapter_config.json: the file cannot be read as JSON (maximum recursion depth exceeded" in refused(folder)


@pytest.mark.parametrize(
    "header",
    [b"[" * 100_000, b'{"a": {"data_offsets": [0, Infinity]}}', b'{"a": {"shape": [1e999], "data_offsets": [0, 0]}}'],
)
def test_a_header_that_python_cannot_hold_is_refused(tmp_path: Path, header: bytes) -> None:
    folder = adapter_in(tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "cannot be read" in refused(folder)


def test_tensors_that_are_not_pairs_of_linear_modules_are_refused(tmp_path: Path) -> None:
    first, second = part_names(UP)
    (folder := tmp_path / "a").mkdir()
    assert "the file contains no tensors" in refused(written(folder, {}))
    assert "have the shapes [2, 4] and []" in refused(written(folder, {first: [2, 4]}))
    embedding = "base_model.model.model.embed_tokens.lora_embedding_A"
    assert f"the file contains {embedding}, which is not the matrix A or B" in refused(
        written(folder, {embedding: [2, 4]})
    )
    assert "which do not fit rank 2" in refused(written(folder, {first: [2, 4], second: [6, 3]}))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({f"{UP}.weight": (6, 4)}, ""),
        ({f"{UP}.weight": ()}, ""),
        (
            {f"{UP}.weight": (4, 6)},
            "was trained on a base model in which model.layers.0.mlp.up_proj has 6 x 4 weights, but here it has 4",
        ),
        ({f"{UP}s.weight": (6, 4)}, f"the base model has no linear module {UP} -> the most similar module is {UP}s"),
        (
            {"w.weight": (6, 4)},
            f"the base model has no linear module {UP} -> use the model that the adapter was trained on",
        ),
        (
            {f"{UP}.weight": (6,)},
            f"the adapter changes {UP}, but an embedding, the head or a norm cannot have an adapter",
        ),
    ],
)
def test_an_adapter_fits_a_base_with_its_modules_and_sizes(weights: dict[str, tuple[int, ...]], words: str) -> None:
    problem = base_problem(AdapterFolder(Path("a"), 2, 1.0, {UP: (4, 6)}), weights)
    assert words in str(problem) if words else problem is None


def test_the_head_has_no_adapter() -> None:
    problem = base_problem(AdapterFolder(Path("a"), 2, 1.0, {"lm_head": (4, 6)}), {"lm_head.weight": (6, 4)})
    assert "changes lm_head, but an embedding, the head" in str(problem)
