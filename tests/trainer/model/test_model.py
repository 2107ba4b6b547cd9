"""Claims about making and loading models: deterministic, exact, and one sentence for every mistake."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError
from trainer.export import named_tensors, write_model
from trainer.model.model import check_folder, config_from_init, load_causal_lm, make_model, resolve_folder, to_device
from trainer.model.tokenizers import build_tokenizer

INIT: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
TOKENIZER = build_tokenizer("characters:running_sum", None)


def made(seed: int = 1, **changes: Any) -> PreTrainedModel:
    return make_model(INIT | changes, TOKENIZER, seed=seed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    target.mkdir()
    write_model(made(), target, dtype="float32")
    return target


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def test_made_model_is_a_pure_function_of_its_seed() -> None:
    torch.manual_seed(99)
    first = state(made(seed=1))
    torch.manual_seed(5)
    again, other = state(made(seed=1)), state(made(seed=2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_making_a_model_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    made()
    assert torch.equal(torch.rand(3), expected)


def test_made_model_takes_vocabulary_and_special_ids_of_the_tokenizer() -> None:
    config = made().config
    assert (config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id) == (18, 0, 1, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hiden_size": 3}, "did you mean hidden_size"),
        ({"model_type": "qwen33"}, "did you mean qwen3"),
        ({"model_type": "t5"}, "not a causal language model"),
        ({"model_type": None}, "no model_type"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"vocab_size": 4}, "the vocabulary size is 4, but the tokenizer has 18 tokens"),
        ({"num_attention_heads": 0}, "correct"),
    ],
)
def test_mistake_in_init_is_one_sentence_with_a_remedy(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        make_model(INIT | changes, TOKENIZER, seed=1)
    assert "->" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_init_may_ask_for_a_larger_vocabulary() -> None:
    assert config_from_init(INIT | {"vocab_size": 32}, TOKENIZER).vocab_size == 32


def test_loaded_model_has_the_saved_bits_in_float32(folder: Path) -> None:
    loaded = load_causal_lm(folder)
    expected = state(made())
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.float32}
    assert all(torch.equal(expected[name], tensor) for name, tensor in loaded.state_dict().items())


def test_bfloat16_folder_is_trained_in_float32(tmp_path: Path) -> None:
    write_model(made(), tmp_path, dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_causal_lm(tmp_path)
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.float32}
    expected = {name: tensor.bfloat16().float() for name, tensor in state(made()).items()}
    assert all(torch.equal(expected[name], tensor) for name, tensor in loaded.state_dict().items())


def test_tied_head_is_saved_and_listed_once_in_every_dtype(tmp_path: Path) -> None:
    model = made(tie_word_embeddings=True)
    assert "lm_head.weight" not in named_tensors(model)
    for dtype in ("float32", "bfloat16"):
        target = tmp_path / dtype
        target.mkdir()
        write_model(model, target, dtype=dtype)  # type: ignore[arg-type]
        loaded = load_causal_lm(target)
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_loaded_model_does_not_depend_on_its_files(folder: Path) -> None:
    loaded = load_causal_lm(folder)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    (folder / "model.safetensors").write_bytes(b"\0" * (folder / "model.safetensors").stat().st_size)
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.state_dict().items())


def test_dropout_is_off_whatever_the_config_says() -> None:
    model = make_model(
        {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.5},
        TOKENIZER,
        seed=1,
    )
    model.train()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def break_missing(folder: Path) -> None:
    shutil.rmtree(folder)


def break_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config_text(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def break_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def break_truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def break_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")


def break_empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def break_class(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))


def break_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))


def break_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    more = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (folder / "config.json").write_text(json.dumps(config | more))


def break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-2.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_missing, "no such model folder"),
        (break_config, "no config.json"),
        (break_config_text, "cannot be read as a JSON object"),
        (break_no_weights, "no weights"),
        (break_truncated, "cannot be read"),
        (break_header, "cannot be read"),
        (break_empty_file, "cannot be read"),
        (break_class, "not a causal language model"),
        (
            break_shape,
            r"does not match the weights: .* has shape \(.*\) in the file, but \(.*\) according to config.json",
        ),
        (break_layers, "does not match the weights: .* is missing"),
        (break_index, "which is missing"),
    ],
)
def test_bad_folder_is_one_sentence_with_a_remedy(damage: Any, words: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(UserError, match=words) as caught:
        load_causal_lm(folder)
    assert "->" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_that_are_not_finite_are_reported_with_their_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-64] + b"\xff" * 64)
    with pytest.raises(UserError, match="1 tensors contain values that are not finite; the first is") as caught:
        load_causal_lm(folder)
    assert caught.value.where == str(file)
    assert "download the model again" in caught.value.remedy


def test_whole_folder_passes_the_check(folder: Path) -> None:
    assert check_folder(folder).model_type == "qwen3"


def test_name_that_is_neither_folder_nor_hub_name_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such model folder"):
        resolve_folder(str(tmp_path / "absent"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        resolve_folder(str(tmp_path / "file"))


def test_unreachable_hub_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match="the download from the hub failed"):
        resolve_folder("some-one/some-model")


@pytest.mark.parametrize("device", ["cuda:7", "gpu", "tpu"])
def test_absent_device_is_a_user_error(device: str) -> None:
    with pytest.raises(UserError, match="cannot be used"):
        to_device(made(), device)
