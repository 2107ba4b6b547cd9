"""Claims about the copy of the training state: complete, of one moment, and whole again from any cut."""

from __future__ import annotations

import itertools

import pytest
import torch

from trainer.host_copy import HostCopy, Part, assemble, whole_part


def cut(key: str, tensor: torch.Tensor, *bounds: int) -> list[Part]:
    """Parts of `tensor` laid flat, between these bounds."""
    flat, edges = tensor.reshape(-1), [0, *bounds, tensor.numel()]
    return [Part(key, tuple(tensor.shape), a, flat[a:b]) for a, b in itertools.pairwise(edges)]


def test_copy_does_not_change_with_what_it_was_made_of() -> None:
    weight = torch.arange(6.0).view(2, 3)
    copied = HostCopy().take([whole_part("weight/a", weight)])
    weight.zero_()
    assert torch.equal(assemble([(copied.places, copied.buffer_U)])["weight/a"], torch.arange(6.0).view(2, 3))


def test_types_shapes_scalars_and_empty_tensors_come_back() -> None:
    parts = {
        "weight/half": torch.randn(3, 5).bfloat16(), "weight/ids": torch.arange(7), "weight/none": torch.empty(0, 4),
        "step/a": torch.tensor(3.0), "weight/flag": torch.tensor([True, False, True]),
    }  # fmt: skip
    copied = HostCopy().take([whole_part(key, tensor) for key, tensor in parts.items()])
    found = assemble([(copied.places, copied.buffer_U)])
    assert found.keys() == parts.keys()
    for key, tensor in parts.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor)


@pytest.mark.parametrize("bounds", [(4, 8), (1, 2), (0, 12), (5, 5)])
def test_parts_of_three_ranks_are_one_tensor_again(bounds: tuple[int, int]) -> None:
    """As FSDP cuts it, as ZeRO does, and where a rank has nothing."""
    tensor = torch.randn(4, 3)
    copies = [HostCopy().take([part]) for part in cut("exp_avg/a", tensor, *bounds)]
    found = assemble((copied.places, copied.buffer_U) for copied in copies)
    assert torch.equal(found["exp_avg/a"], tensor)


def test_missing_and_doubled_parts_are_noticed() -> None:
    first, second, third = cut("weight/a", torch.randn(9), 3, 6)
    for chosen in ([first, third], [first, second, second, third]):
        copied = HostCopy().take(chosen)
        with pytest.raises(AssertionError, match="on no rank, or on several"):
            assemble([(copied.places, copied.buffer_U)])


def test_buffer_is_used_again_and_rebuilt_when_the_layout_changes() -> None:
    copy = HostCopy()
    first = copy.take([whole_part("weight/a", torch.ones(8))])
    again = copy.take([whole_part("weight/a", torch.zeros(8))])
    assert again.buffer_U.data_ptr() == first.buffer_U.data_ptr()
    more = copy.take([whole_part("weight/a", torch.ones(8)), whole_part("exp_avg/a", torch.full((8,), 2.0))])
    found = assemble([(more.places, more.buffer_U)])
    assert torch.equal(found["exp_avg/a"], torch.full((8,), 2.0))
    assert more.buffer_U.data_ptr() % 64 == 0 or more.places[0].offset == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_copy_of_a_gpu_is_complete_once_waited_for_and_the_fence_keeps_updates_back() -> None:
    weight = torch.arange(1 << 22, dtype=torch.float32, device="cuda")
    copy = HostCopy()
    copied = copy.take([whole_part("weight/a", weight)])
    assert copied.buffer_U.is_pinned()
    copy.fence()
    weight.zero_()
    copied.wait()
    assert torch.equal(assemble([(copied.places, copied.buffer_U)])["weight/a"], torch.arange(1 << 22).float())
