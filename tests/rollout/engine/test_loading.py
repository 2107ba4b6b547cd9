"""Published tensors on their way into a decoder's memory: what does not fit is refused and named."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from areal_like.errors import WeightError
from areal_like.weights.payload_layout import TensorEntry
from areal_like.weights.weight_store import WeightManifest
from rollout.engine.loading import FusedWeights, Place, fill, tensors_of
from rollout.engine.shape import ModelShape

CPU = torch.device("cpu")
SHAPE = ModelShape(
    family="qwen3", num_layers=2, hidden_size=6, num_heads=4, num_key_heads=2, head_size=3, intermediate_size=5,
    vocab_size=7, norm_eps=1e-6, is_head_tied=False, has_qkv_bias=True, has_out_bias=True, has_mlp_bias=True,
    has_qk_norm=True,
)  # fmt: skip


def test_tensors_go_to_their_places_scaled_where_the_place_says_so() -> None:
    memory = torch.zeros(2, 6)
    places = {
        "a": Place((6,), (2, 3), memory[:, :3]), "b": Place((3,), (3,), memory[:, 3:], 2.0),
    }  # fmt: skip
    fill(places, {"a": torch.arange(6.0), "b": torch.tensor([1.0, 2.0, 3.0])}, frozenset(), 1)
    assert memory.tolist() == [[0, 1, 2, 2, 4, 6], [3, 4, 5, 2, 4, 6]]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "version 9 lacks 2 tensors of this model; the first is a"),
        ({"a": torch.zeros(2)}, "version 9 lacks 1 tensors of this model; the first is b"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(1)},
            "has 1 tensors that this model does not have.* c",
        ),
        ({"a": torch.zeros(3), "b": torch.zeros(1)}, r"a has shape \(3,\), expected \(2,\)"),
        ({"a": torch.zeros(2, 1), "b": torch.zeros(1)}, "a has shape"),
        ({"a": torch.tensor([0.0, torch.inf]), "b": torch.zeros(1)}, "a contains a value that is not finite"),
        ({"a": torch.zeros(2), "b": torch.tensor([torch.nan])}, "b contains a value that is not finite"),
        ({"a": torch.tensor([torch.inf, -torch.inf]), "b": torch.zeros(1)}, "a contains"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused(tensors: dict[str, torch.Tensor], words: str) -> None:
    places = {"a": Place((2,), (2,), torch.zeros(2)), "b": Place((1,), (1,), torch.zeros(1))}
    with pytest.raises(WeightError, match=words):
        fill(places, tensors, frozenset({"head"}), 9)


def test_values_whose_sum_overflows_are_finite_all_the_same_and_optional_tensors_are_ignored() -> None:
    target = torch.zeros(2)
    most = torch.finfo(torch.float32).max
    fill({"a": Place((2,), (2,), target)}, {"a": torch.tensor([most, most]), "head": target}, frozenset({"head"}), 1)
    assert target.tolist() == [most, most]


@pytest.mark.parametrize(
    "without", [(), ("is_head_tied",), ("has_qkv_bias",), ("has_out_bias",), ("has_mlp_bias",), ("has_qk_norm",)]
)
def test_every_number_of_a_model_has_a_place_of_its_own(without: tuple[str, ...]) -> None:
    shape = dataclasses.replace(SHAPE, **{name: name == "is_head_tied" for name in without})
    weights = FusedWeights(shape, torch.float32, CPU, norm_scale=False)
    number = 0.0
    tensors: dict[str, torch.Tensor] = {}
    for name, place in weights.places.items():
        size = torch.Size(place.shape).numel()
        tensors[name] = torch.arange(number, number + size).view(place.shape)
        number += size
    weights.load(tensors, 1)
    found = torch.cat([place.target.flatten() for place in weights.places.values()])
    assert len(set(found.tolist())) == int(number)
    num_copies = SHAPE.num_layers * (4 + 2 - 2) if shape.has_qk_norm else 0  # every head has the norm of its kind
    assert weights.num_bytes == 4 * (int(number) + num_copies * SHAPE.head_size)
    assert ("lm_head.weight" in weights.places) is not shape.is_head_tied
    if shape.is_head_tied:
        weights.load({**tensors, "lm_head.weight": torch.zeros(1)}, 2)


@pytest.mark.parametrize(("norm_scale", "scales"), [(False, (1.0, 1.0)), (True, (6**0.5, 3**0.5))])
def test_norms_are_stored_in_the_decoders_form(norm_scale: bool, scales: tuple[float, float]) -> None:
    weights = FusedWeights(SHAPE, torch.float32, CPU, norm_scale=norm_scale)
    weights.load({name: torch.ones(place.shape) for name, place in weights.places.items()}, 1)
    layer = weights.layers[0]
    assert layer.qk_norm is not None
    wide, narrow = scales
    norms = ((layer.attention_norm, wide), (layer.mlp_norm, wide), (weights.norm, wide), (layer.qk_norm, narrow))
    for norm, scale in norms:
        assert torch.allclose(norm, torch.full_like(norm, scale))
    assert torch.equal(layer.qkv, torch.ones_like(layer.qkv))


def test_bytes_of_a_payload_are_viewed_with_their_type_and_shape() -> None:
    def manifest(dtype: str, num_items: int) -> WeightManifest:
        entry = TensorEntry(name="w", dtype=dtype, shape=(1, num_items), offset=0, num_bytes=8, crc32=0)
        return WeightManifest(version=3, lineage="l0", kind="shm", payload="p", num_bytes=8, tensors=(entry,))

    payload = {"w": memoryview(bytearray(torch.tensor([1.5, -2.0]).numpy().tobytes()))}
    assert tensors_of(manifest("float32", 2), payload)["w"].tolist() == [[1.5, -2.0]]
    with pytest.raises(WeightError, match="version 3: w has unknown dtype uint8"):
        tensors_of(manifest("uint8", 8), payload)
