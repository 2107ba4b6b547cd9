"""A trainer that gives its device away between steps trains exactly as one that does not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from trainer import policy_start, training
from trainer.colocation import SharedDevices
from trainer.config import OptimizerSettings
from trainer.export import write_model
from trainer.optimizer import PolicyOptimizer


class PlayedPolicy:
    """Notes where it was put."""

    def __init__(self, num_bytes: int = 1) -> None:
        self.moves: list[str] = []
        self.num_bytes = num_bytes

    def move(self, device: torch.device) -> int:
        self.moves.append(str(device))
        return self.num_bytes


class PlayedSpans:
    def __init__(self) -> None:
        self.names: list[str] = []

    def span(self, name: str, lane: str = "main", **args: Any) -> Any:
        self.names.append(name)
        return nullcontext()


def test_the_device_is_taken_for_a_step_and_left_after_it_and_the_timeline_shows_both() -> None:
    policy, spans = PlayedPolicy(), PlayedSpans()
    devices = SharedDevices(policy, (), torch.device("cuda:1"), is_shared=True, tracer=spans)
    devices.take()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", lambda: policy.moves.append("emptied"))
        devices.leave()
    assert policy.moves == ["cuda:1", "cpu", "emptied"]
    assert spans.names == ["take_memory", "release_memory"]


def test_a_critic_goes_where_the_policy_goes() -> None:
    policy, critic = PlayedPolicy(), PlayedPolicy()
    devices = SharedDevices(policy, (), torch.device("cpu"), is_shared=True, critic=critic)  # type: ignore[arg-type]
    devices.take()
    assert policy.moves == critic.moves == ["cpu"]


@pytest.mark.parametrize("has_more", [False, True])
def test_what_is_moved_is_logged_in_bytes_and_given_back_before_the_others_are_waited_for(
    has_more: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy, critic, log = PlayedPolicy(), PlayedPolicy(), list[Any]()
    reference: Any = SimpleNamespace(to=lambda device: log.append(("reference", str(device))))
    ranks: Any = SimpleNamespace(wait_for_all=lambda what: log.append(what))
    monkeypatch.setattr("trainer.colocation.trim_heap", lambda: log.append("trimmed"))
    more: dict[str, Any] = {"critic": critic, "ranks": ranks} if has_more else {}
    cpu = torch.device("cpu")
    devices = SharedDevices(policy, (reference,) if has_more else (), cpu, is_shared=True, **more)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "trainer.colocation"):
        devices.take()
        devices.leave()
    num_bytes = 2 if has_more else 1
    assert [record.getMessage() for record in caplog.records] == [
        f"moved {num_bytes} bytes of models and optimizer state to cpu"
    ] * 2
    moves: list[Any] = [("reference", "cpu")]
    waited = "releasing the memory of shared devices"
    assert log == ([*moves, *moves, "trimmed", waited] if has_more else ["trimmed"])
    assert critic.moves == (["cpu", "cpu"] if has_more else [])


def test_where_nothing_had_to_move_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    policy = PlayedPolicy(num_bytes=0)
    with caplog.at_level(logging.INFO, "trainer.colocation"):
        SharedDevices(policy, (), torch.device("cpu"), is_shared=True).take()  # type: ignore[arg-type]
    assert policy.moves == ["cpu"]
    assert not caplog.records


def test_memory_of_a_gpu_is_collected_before_its_cache_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr("trainer.colocation.gc.collect", lambda: log.append("collected"))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: log.append("emptied"))
    monkeypatch.setattr("trainer.colocation.trim_heap", lambda: log.append("trimmed"))
    SharedDevices(PlayedPolicy(), (), torch.device("cuda:1"), is_shared=True).leave()  # type: ignore[arg-type]
    assert log == ["collected", "emptied"]


def test_a_trainer_with_a_device_of_its_own_never_moves() -> None:
    policy = PlayedPolicy()
    devices = SharedDevices(policy, (), torch.device("cuda:1"), is_shared=False)
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


@pytest.mark.parametrize(
    ("is_taken", "asked_for"), [(True, ["cpu", "cpu"]), (False, ["cuda:0", "cuda:0"])], ids=["restart", "first_start"]
)
def test_a_trainer_that_starts_again_loads_into_host_memory_because_engines_may_hold_the_device(
    is_taken: bool,
    asked_for: list[str],
    tmp_path: Path,
    tiny_model: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The policy and the reference model; with the first version published nothing of it has been on the device."""
    write_model(tiny_model(), tmp_path, dtype="float32")
    honest, asked = policy_start.load_causal_lm, list[str]()

    def load(folder: Path, *, device: str = "cpu") -> PreTrainedModel:
        asked.append(device)
        return honest(folder)

    monkeypatch.setattr(policy_start, "load_causal_lm", load)
    monkeypatch.setattr(training, "hardware_of", lambda device: device)  # this machine need not have a GPU
    spec = ProcessSpec(
        role="trainer", name="trainer", run_id="t", run_dir=str(tmp_path / "run"), hub_address="", seed=1,
        parent_pid=os.getpid(), model=ModelSettings(path=str(tmp_path)), sampling=SamplingSettings(),
        staleness=StalenessSettings(), groups_per_step=1, group_size=1, num_steps=1, mode="sync",
        weight_dir=str(tmp_path / "weights"), is_colocated=True, is_device_taken=is_taken,
        settings={"device": "cuda:0", "attention": "sdpa", "loss": {"kl_coef": 0.1}},
    )  # fmt: skip
    trained = training.Training(spec)
    trained.open()
    assert asked == asked_for
    if is_taken:
        trained.publish()()
        assert {parameter.device.type for parameter in trained.model.parameters()} == {"cpu"}
