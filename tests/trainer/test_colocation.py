"""A trainer that gives its device away between steps trains exactly as one that does not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from trainer.colocation import SharedDevices
from trainer.config import OptimizerSettings
from trainer.optimizer import PolicyOptimizer


class PlayedPolicy:
    """Notes where it was put."""

    def __init__(self) -> None:
        self.moves: list[str] = []

    def move(self, device: torch.device) -> int:
        self.moves.append(str(device))
        return 1


class PlayedSpans:
    def __init__(self) -> None:
        self.names: list[str] = []

    def span(self, name: str, lane: str = "main", **args: Any) -> Any:
        self.names.append(name)
        return nullcontext()


def test_the_device_is_taken_for_a_step_and_left_after_it_and_the_timeline_shows_both() -> None:
    policy, spans = PlayedPolicy(), PlayedSpans()
    devices = SharedDevices(policy, None, torch.device("cuda:1"), is_shared=True, tracer=spans)
    devices.take()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", lambda: policy.moves.append("emptied"))
        devices.leave()
    assert policy.moves == ["cuda:1", "cpu", "emptied"]
    assert spans.names == ["take_memory", "release_memory"]


def test_a_trainer_with_a_device_of_its_own_never_moves() -> None:
    policy = PlayedPolicy()
    devices = SharedDevices(policy, None, torch.device("cuda:1"), is_shared=False)
    devices.take()
    devices.leave()
    assert policy.moves == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_weights_and_moments_survive_the_way_to_host_memory_and_back_bit_by_bit() -> None:
    def trained(*, is_shared: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        device = torch.device("cuda")
        model = torch.nn.Linear(64, 64).to(device)
        optimizer = PolicyOptimizer(model, OptimizerSettings(lr=0.1), 10)
        for step in range(1, 4):
            torch.manual_seed(step)
            model(torch.randn(8, 64, device=device)).square().sum().backward()
            optimizer.update(step)
            if is_shared:
                for place in (torch.device("cpu"), device):
                    model.to(place)
                    assert optimizer.move(place) > 0
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for plain, moved in zip(trained(is_shared=False), trained(is_shared=True), strict=True):
        assert torch.equal(plain, moved)
