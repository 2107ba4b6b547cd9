"""Ranks that exchange tokens for heads attend as one process does, whatever the numbers of heads.

The ranks are threads, and the exchange is through memory; tests/trainer/test_layouts.py has real ones.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch

from areal_like.errors import UserError
from trainer.model import sequence_group
from trainer.model.attention import packed_attention
from trainer.model.packed import PackedSequences
from trainer.model.row_parts import part_of
from trainer.model.sequence_group import SequenceGroup, check_heads

LENGTHS = (9, 5, 30, 6)


class Mailbox:
    """All-to-all between threads."""

    def __init__(self, size: int) -> None:
        self.sent: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60.0)

    def exchange(self, place: int, parts_N: torch.Tensor) -> torch.Tensor:
        self.sent[place] = parts_N.clone()
        self.barrier.wait()
        received = torch.stack([parts[place] for parts in self.sent])
        self.barrier.wait()
        return received


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 2), (4, 2, 4), (6, 3, 2), (4, 1, 2), (12, 4, 6)])
def test_attention_and_its_gradient_do_not_depend_on_the_number_of_ranks(
    heads: int, kv_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, module = Mailbox(size), torch.nn.Identity()
    monkeypatch.setattr(sequence_group, "_exchange", lambda parts_N, place: box.exchange(place, parts_N))
    packed = PackedSequences.build(
        [np.arange(1, length + 1) for length in LENGTHS], [np.arange(length) > 0 for length in LENGTHS]
    )
    torch.manual_seed(0)
    num = packed.num_tokens
    whole = [torch.randn(1, count, num, 8, requires_grad=True) for count in (heads, kv_heads, kv_heads)]
    weight_THD = torch.randn(num, heads, 8)
    expected, _ = packed_attention("sdpa", module, *whole, None, packed_segments=packed.segments)
    gradients = torch.autograd.grad((expected[0] * weight_THD).sum(), whole)

    def compute(place: int) -> tuple[torch.Tensor, ...]:
        part = part_of(packed, SequenceGroup(place, size, cast(Any, place))).packed
        own = slice(place * part.num_tokens, (place + 1) * part.num_tokens)
        missing = part.num_tokens - len(weight_THD[own])
        mine = [torch.nn.functional.pad(x.detach()[:, :, own], (0, 0, 0, missing)).requires_grad_() for x in whole]
        out, _ = packed_attention("sdpa", module, *mine, None, packed_segments=part.segments)
        loss = (out[0, : len(weight_THD[own])] * weight_THD[own]).sum()
        return out[0].detach(), *torch.autograd.grad(loss, mine)

    with ThreadPoolExecutor(size) as threads:
        parts = list(threads.map(compute, range(size)))
    found = torch.cat([out_SHD for out_SHD, *_ in parts])[:num]
    assert torch.allclose(found, expected[0], atol=1e-6)
    for index, gradient in enumerate(gradients):
        joined = torch.cat([part[1 + index] for part in parts], dim=2)[:, :, :num]
        assert torch.allclose(joined, gradient, atol=1e-5)


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    check_heads(12, 6)
    with pytest.raises(UserError, match=r"trainer\.sequence_parallel: 8 ranks cannot share the model's 12 attention"):
        check_heads(12, 8)
