"""Claims about model folders and loaded models that a run leans on: where files are found, what is counted."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_like.errors import UserError
from trainer.export import write_model
from trainer.model import logprobs
from trainer.model import model as module
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import hidden_states
from trainer.model.model import (
    all_finite,
    check_folder,
    load_causal_lm,
    model_context,
    num_parameters,
    resolve_folder,
    weight_files,
)
from trainer.model.packed import PackedSequences


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Any) -> Path:
    target = tmp_path / "model"
    target.mkdir()
    write_model(tiny_model("qwen3"), target, dtype="float32")
    return target


def cut_in_two(folder: Path) -> list[str]:
    """The weights in two files with an index, as large models have them; names in the second."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return parts["b.safetensors"]


# ---------------------------------------------------------------- finding


def test_folder_is_taken_as_it_is_and_a_hub_name_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def download(name: str, allow_patterns: Any, etag_timeout: float, tqdm_class: type | None) -> str:
        asked.append((name, allow_patterns))
        assert etag_timeout > 0
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder(str(tmp_path)) == tmp_path
    assert resolve_folder("someone/some-model_1.5") == tmp_path / "snapshot"
    ((name, patterns),) = asked
    assert name == "someone/some-model_1.5"
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern for pattern in patterns), "no pickled weights are fetched"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert resolve_folder("~/mine") == tmp_path / "mine"


@pytest.mark.parametrize("name", ["a/b/c", "-x/y", "/no/such", "plain", "a/ b"])
def test_what_is_no_hub_name_is_never_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(UserError, match="there is no such model folder"):
        resolve_folder(name)


def test_file_in_place_of_a_folder_says_what_to_name(folder: Path) -> None:
    with pytest.raises(UserError, match="is a file, not a model folder"):
        resolve_folder(str(folder / "config.json"))


def test_weights_are_those_of_the_index_else_one_file_else_pickled(folder: Path) -> None:
    assert weight_files(folder) == [folder / "model.safetensors"]
    (folder / "pytorch_model.bin").touch()
    assert weight_files(folder) == [folder / "model.safetensors"]
    cut_in_two(folder)
    assert weight_files(folder) == [folder / "a.safetensors", folder / "b.safetensors"]
    check_folder(folder)
    for name in ("a.safetensors", "b.safetensors", "model.safetensors.index.json"):
        (folder / name).unlink()
    assert weight_files(folder) == [folder / "pytorch_model.bin"]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": []}}']
)
def test_index_that_cannot_be_read_is_damaged(text: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="the index cannot be read"):
        weight_files(folder)


def test_value_that_is_not_finite_is_reported_with_the_file_that_has_it(folder: Path) -> None:
    name = cut_in_two(folder)[0]
    tensors = load_file(folder / "b.safetensors")
    tensors[name].view(-1)[0] = float("inf")
    save_file(tensors, folder / "b.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"1 tensors contain values that are not finite; the first is {name}") as raised:
        load_causal_lm(folder)
    assert raised.value.where == str(folder / "b.safetensors")
    assert module._file_of("no.such.tensor", folder) == str(folder), "of several files the folder"
    for file in ("a.safetensors", "b.safetensors", "model.safetensors.index.json"):
        (folder / file).unlink()
    (folder / "pytorch_model.bin").touch()
    assert module._file_of(name, folder) == str(folder / "pytorch_model.bin")


def test_config_without_a_class_is_taken_by_its_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    assert check_folder(folder).model_type == "qwen3"


# ---------------------------------------------------------------- loading


def test_unknown_tensors_are_ignored_with_a_warning_and_missing_ones_are_listed_up_to_three(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "more": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, "trainer.model.model"):
        load_causal_lm(folder)
    assert f"{folder}: ignored 1 tensors that the model does not have" in [
        record.getMessage() for record in caplog.records
    ]
    left = dict(sorted(tensors.items())[:-5])
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"is missing; .* is missing; .* is missing, and 2 more"):
        load_causal_lm(folder)
    save_file(dict(sorted(tensors.items())[:-3]), folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as raised:
        load_causal_lm(folder)
    assert "more" not in raised.value.what
    assert raised.value.what.count("is missing") == 3


def test_mismatch_is_put_into_words_whatever_transformers_reports() -> None:
    words = module._mismatch_words(("w", (2, 3), (4, 3)))
    assert words == "w has shape (2, 3) in the file, but (4, 3) according to config.json"
    for other in ("w", "wte", ("w", (2, 3))):
        assert module._mismatch_words(other) == f"{other} has a different shape"


def test_trained_model_is_in_evaluation_mode_without_dropout_anywhere() -> None:
    layer = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(2, 2))
    for name in ("attention_dropout", "attn_dropout", "dropout"):
        setattr(layer, name, 0.4)
    layer.train()
    module.without_dropout(layer)  # type: ignore[arg-type]
    assert not layer.training
    assert layer[0].p == 0.0
    assert [getattr(layer, name) for name in ("attention_dropout", "attn_dropout", "dropout")] == [0.0, 0.0, 0.0]


def test_tied_parameters_are_counted_once(tiny_model: Any) -> None:
    apart, tied = tiny_model("qwen3"), tiny_model("qwen3", tie_word_embeddings=True)
    assert num_parameters(apart) - num_parameters(tied) == apart.lm_head.weight.numel()


@pytest.mark.parametrize(
    ("values", "is_finite"),
    [
        ([1.0, 2.0], True),
        ([3e38, 3e38], True),
        ([1.0, float("nan")], False),
        ([float("inf"), float("-inf")], False),
        ([], True),
    ],
)
def test_large_values_whose_sum_overflows_are_finite(values: list[float], is_finite: bool) -> None:
    assert all_finite(torch.tensor(values)) is is_finite
    assert all_finite(torch.tensor(values).to(torch.float64)) is is_finite


def test_longest_sequence_is_what_the_config_says(tiny_model: Any) -> None:
    limit = model_context(tiny_model("qwen3").config)
    assert limit is not None
    limit.check(256, where="a sequence")
    with pytest.raises(UserError):
        limit.check(257, where="a sequence")


# ---------------------------------------------------------------- the packed pass


def test_packed_pass_keeps_no_cache_and_no_mask(
    tiny_model: Any, sequences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3")
    attach(model, AttentionChoice("sdpa", "test"))
    seen: dict[str, Any] = {}
    forward = model.base_model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        seen.update(cache=output.past_key_values, mask=kwargs.get("attention_mask"))
        return output

    monkeypatch.setattr(model.base_model, "forward", watched)
    packed = PackedSequences.build(*sequences((5, 9)))
    hidden_TD = hidden_states(model, packed)
    assert seen == {"cache": None, "mask": None}
    assert hidden_TD.shape == (14, 32)


def test_packed_pass_refuses_a_sequence_beyond_the_models_positions_though_the_row_may_be_longer(
    tiny_model: Any, sequences: Any
) -> None:
    model = tiny_model("qwen3", max_position_embeddings=16)
    attach(model, AttentionChoice("sdpa", "test"))
    hidden_states(model, PackedSequences.build(*sequences((16, 16))))
    with pytest.raises(UserError, match="a sequence"):
        hidden_states(model, PackedSequences.build(*sequences((17, 5))))


@pytest.mark.parametrize(
    ("device", "autocast", "wanted"),
    [
        ("cpu", True, torch.float32),
        ("cpu", False, torch.float32),
        ("cuda", True, torch.bfloat16),
        ("cuda", False, torch.float32),
    ],
)
def test_head_multiplies_in_the_autocast_type_on_a_gpu_and_in_float32_on_a_cpu(
    device: str, autocast: bool, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    assert logprobs._compute_dtype(SimpleNamespace(device=torch.device(device))) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "head"),
    [
        ({}, (1.0, None)), ({"logit_scale": 0.25}, (0.25, None)), ({"logits_scaling": 4.0}, (0.25, None)),
        ({"logit_scale": 0.5, "logits_scaling": 4.0}, (0.5, None)), ({"final_logit_softcapping": 30}, (1.0, 30.0)),
        ({"model_type": "hyperclovax", "logits_scaling": 4.0}, (4.0, None)),
    ],
)  # fmt: skip
def test_head_reads_what_the_config_does_to_logits(changes: dict[str, Any], head: Any) -> None:
    config = SimpleNamespace(**{"model_type": "qwen3", **changes})
    config.get_text_config = lambda: config
    found = logprobs.Head.of(SimpleNamespace(config=config), 0.7)  # type: ignore[arg-type]
    assert (found.scale, found.cap, found.temperature) == (*head, 0.7)


@pytest.mark.parametrize(
    "head", [(1.0, None, 1.0), (0.5, None, 1.0), (1.0, None, 0.5), (0.5, 3.0, 0.7), (1.0, 3.0, 1.0)]
)
def test_logits_and_their_gradient_are_those_of_the_formula(head: Any) -> None:
    scale, cap, temperature = head
    raw = torch.linspace(-4, 4, 12).view(3, 4).requires_grad_()
    formula = (cap * torch.tanh(scale * raw / cap) if cap else scale * raw) / temperature
    weights = torch.linspace(1, 2, 12).view(3, 4)
    (wanted,) = torch.autograd.grad((formula * weights).sum(), raw)
    made = logprobs.Head(*head)
    torch.testing.assert_close(made.logits(raw), formula)
    with torch.no_grad():
        torch.testing.assert_close(made.logits(raw.clone()), formula)
        torch.testing.assert_close(made.raw_gradient(weights.clone(), formula.clone()), wanted)


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "out_dtype"),
    [
        (True, torch.bfloat16, torch.float32), (True, torch.float32, None), (False, torch.bfloat16, None),
        (False, torch.float32, None),
    ],
)  # fmt: skip
def test_sixteen_bit_products_are_kept_in_float32_where_the_device_can(
    is_cuda: bool, dtype: torch.dtype, out_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is played: what is asked of the product is what matters."""
    asked: list[torch.dtype | None] = []
    product = torch.mm

    def mm(left: Any, right: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        asked.append(out_dtype)
        made = product(getattr(left, "tensor", left), right)
        return made if out_dtype is None else made.to(out_dtype)

    class Played:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.is_cuda, self.dtype = tensor, is_cuda, tensor.dtype

        def t(self) -> torch.Tensor:
            return self.tensor.t()

    monkeypatch.setattr(torch, "mm", mm)
    hidden, weight = torch.ones(3, 2, dtype=dtype), torch.full((4, 2), 2.0, dtype=dtype)
    raw = logprobs._raw(Played(hidden), weight, torch.ones(4))  # type: ignore[arg-type]
    assert raw.dtype == torch.float32
    assert torch.equal(raw, torch.full((3, 4), 5.0))
    assert asked == [out_dtype]
    asked.clear()
    total = torch.ones(4, 2)
    gradient = torch.ones(3, 4, dtype=dtype)
    logprobs._accumulate(total, Played(gradient) if dtype != torch.float32 else gradient, hidden)  # type: ignore[arg-type]
    assert torch.equal(total, torch.full((4, 2), 4.0))
    assert asked == ([] if dtype == torch.float32 else [out_dtype])
