"""Claims about the copy of the training state: complete, of one moment, and whole again from any cut."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from part_channels import assemble

from trainer.host_copy import ALIGNMENT, HostCopy, Part, whole_part


def cut(key: str, tensor: torch.Tensor, *bounds: int) -> list[Part]:
    """Parts of `tensor` laid flat, between these bounds."""
    flat, edges = tensor.reshape(-1), [0, *bounds, tensor.numel()]
    return [Part(key, tuple(tensor.shape), a, flat[a:b]) for a, b in itertools.pairwise(edges)]


def test_copy_does_not_change_with_what_it_was_made_of() -> None:
    weight = torch.arange(6.0).view(2, 3)
    copied = HostCopy().take([whole_part("weight/a", weight)])
    weight.zero_()
    assert torch.equal(assemble(copied)["weight/a"], torch.arange(6.0).view(2, 3))


def test_types_shapes_scalars_and_empty_tensors_come_back() -> None:
    parts = {
        "weight/half": torch.randn(3, 5).bfloat16(), "weight/ids": torch.arange(7), "weight/none": torch.empty(0, 4),
        "step/a": torch.tensor(3.0), "weight/flag": torch.tensor([True, False, True]),
    }  # fmt: skip
    copied = HostCopy().take([whole_part(key, tensor) for key, tensor in parts.items()])
    found = assemble(copied)
    assert found.keys() == parts.keys()
    for key, tensor in parts.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor)


@pytest.mark.parametrize("bounds", [(4, 8), (1, 2), (0, 12), (5, 5)])
def test_parts_of_three_ranks_are_one_tensor_again(bounds: tuple[int, int]) -> None:
    """As FSDP cuts it, as ZeRO does, and where a rank has nothing."""
    tensor = torch.randn(4, 3)
    copies = [HostCopy().take([part]) for part in cut("exp_avg/a", tensor, *bounds)]
    found = assemble(*copies)
    assert torch.equal(found["exp_avg/a"], tensor)


def test_missing_and_doubled_parts_are_noticed() -> None:
    first, second, third = cut("weight/a", torch.randn(9), 3, 6)
    for chosen in ([first, third], [first, second, second, third]):
        copied = HostCopy().take(chosen)
        with pytest.raises(AssertionError, match="on no rank, or on several"):
            assemble(copied)


def test_buffer_is_used_again_and_rebuilt_when_the_layout_changes() -> None:
    copy = HostCopy()
    first = copy.take([whole_part("weight/a", torch.ones(8))])
    again = copy.take([whole_part("weight/a", torch.zeros(8))])
    assert again.buffer_U.data_ptr() == first.buffer_U.data_ptr()
    more = copy.take([whole_part("weight/a", torch.ones(8)), whole_part("exp_avg/a", torch.full((8,), 2.0))])
    found = assemble(more)
    assert torch.equal(found["exp_avg/a"], torch.full((8,), 2.0))
    assert more.buffer_U.data_ptr() % 64 == 0 or more.places[0].offset == 0


class OnGpu(torch.Tensor):
    """Memory of the host that says it is a GPU's, and tells which stream may read it how long."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: object) -> None:
        NOTES.append(f"keep for {stream}")


NOTES: list[str] = []


class PlayedStream:
    """A stream that notes what is asked of it."""

    def __init__(self, name: str = "side") -> None:
        self.name = name
        NOTES.append(f"new {name}")

    def __repr__(self) -> str:
        return self.name

    def wait_stream(self, other: object) -> None:
        NOTES.append(f"{self} waits for {other}")

    def wait_event(self, event: object) -> None:
        NOTES.append(f"{self} waits for {event}")

    def record_event(self) -> PlayedEvent:
        NOTES.append(f"{self} is marked")
        return PlayedEvent()


class PlayedEvent:
    def __repr__(self) -> str:
        return "mark"

    def synchronize(self) -> None:
        NOTES.append("host waits")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """CUDA's streams are played; whether each buffer was to be pinned."""
    found: list[bool] = []
    main, empty = PlayedStream("main"), torch.empty
    NOTES.clear()

    def made(*size: int, pin_memory: bool = False, **kind: Any) -> torch.Tensor:
        found.append(pin_memory)
        return empty(*size, **kind)

    monkeypatch.setattr("trainer.host_copy.torch.empty", made)
    monkeypatch.setattr("torch.cuda.Stream", PlayedStream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: main)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext(NOTES.append(f"on {stream}")))
    return found


def test_memory_of_a_gpu_is_copied_by_a_stream_of_its_own_which_the_fence_waits_for(pinned: list[bool]) -> None:
    copy = HostCopy()
    near, far = torch.arange(3.0), torch.arange(4.0).as_subclass(OnGpu)
    copied = copy.take([whole_part("weight/near", near), Part("weight/far", (4,), 0, far)])
    start = ["side waits for main", "on side", "keep for side", "side is marked"]
    assert ["new side", *start] == NOTES
    assert pinned[-1] is True
    copied.wait()
    copy.fence()
    copy.fence()
    assert NOTES[5:] == ["host waits", "main waits for mark"], "once for each copy"
    found = assemble(copied)
    assert torch.equal(found["weight/near"], near)
    assert found["weight/far"].tolist() == [0.0, 1.0, 2.0, 3.0]
    NOTES.clear()
    copy.take([whole_part("weight/near", near), Part("weight/far", (4,), 0, far)])
    assert start == NOTES, "the same stream again"


def test_memory_of_the_host_takes_no_stream_and_no_pinned_buffer(pinned: list[bool]) -> None:
    copy = HostCopy()
    copied = copy.take([whole_part("weight/a", torch.ones(3))])
    copied.wait()
    copy.fence()
    assert NOTES == []
    assert copied.done is None
    assert pinned[-1] is False


def test_parts_are_aligned_one_after_another_and_parts_without_items_are_left_out() -> None:
    parts = [
        whole_part("step/a", torch.tensor(3.0)), Part("weight/elsewhere", (8,), 8, torch.empty(0)),
        whole_part("weight/none", torch.empty(0, 2)), whole_part("weight/b", torch.ones(ALIGNMENT // 4)),
        whole_part("weight/c", torch.ones(1)),
    ]  # fmt: skip
    copied = HostCopy().take(parts)
    assert [(place.key, place.offset, place.num_items) for place in copied.places] == [
        ("step/a", 0, 1), ("weight/none", ALIGNMENT, 0), ("weight/b", ALIGNMENT, ALIGNMENT // 4),
        ("weight/c", 2 * ALIGNMENT, 1),
    ]  # fmt: skip
    assert len(copied.buffer_U) == 2 * ALIGNMENT + 4


def test_a_smaller_layout_of_the_same_memory_and_a_tensor_with_a_gradient_are_copied_as_they_are() -> None:
    copy = HostCopy()
    copy.take([whole_part("weight/a", torch.ones(64))])
    weight = torch.nn.Parameter(torch.arange(5.0))
    copied = copy.take([Part("weight/b", (5,), 0, weight)])
    assert torch.equal(assemble(copied)["weight/b"], weight.detach())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_copy_of_a_gpu_is_complete_once_waited_for_and_the_fence_keeps_updates_back() -> None:
    weight = torch.arange(1 << 22, dtype=torch.float32, device="cuda")
    copy = HostCopy()
    copied = copy.take([whole_part("weight/a", weight)])
    assert copied.buffer_U.is_pinned()
    copy.fence()
    weight.zero_()
    copied.wait()
    assert torch.equal(assemble(copied)["weight/a"], torch.arange(1 << 22).float())
