"""Claims about which backend trains and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
import torch

from areal_like.errors import UserError
from trainer.backends import choice
from trainer.backends.choice import TRAINING_BYTES, choose_backend, fitting_backend
from trainer.backends.zero_config import zero_config
from trainer.config import TrainerSettings

CPU = torch.device("cpu")
GB = 1e9


def auto(ranks: int, num_parameters: float, device: str, memory_bytes: float) -> Any:
    settings = TrainerSettings(backend="auto", ranks=ranks)
    return fitting_backend(settings, TRAINING_BYTES * num_parameters, device, memory_bytes)


def test_auto_keeps_to_one_process_where_everything_fits() -> None:
    found = auto(1, 1e9, "cuda", 80 * GB)
    assert found.name == "torch"
    assert found.reason == "auto: one rank, 16 GB of weights, gradients and AdamW fit into 75% of 80 GB"


def test_auto_shards_over_ranks() -> None:
    found = auto(4, 8e9, "cuda", 80 * GB)
    assert (found.name, found.settings.fsdp.cpu_offload) == ("fsdp", False)
    assert "4 ranks, 32 GB" in found.reason


def test_auto_counts_replicas_in_full() -> None:
    settings = TrainerSettings(backend="auto", ranks=4, fsdp={"replicas": 2})
    found = fitting_backend(settings, TRAINING_BYTES * 8e9, "cuda", 80 * GB)
    assert "4 ranks, 64 GB" in found.reason
    assert found.settings.fsdp.cpu_offload
    assert found.settings.fsdp.replicas == 2


def test_replicas_of_unequal_size_are_refused() -> None:
    settings = TrainerSettings(backend="fsdp", ranks=3, fsdp={"replicas": 2})
    with pytest.raises(UserError, match=r"trainer\.fsdp\.replicas: 3 ranks cannot form 2 groups .*replicas: 1, 3"):
        choose_backend(settings, 1, CPU)


@pytest.mark.parametrize("ranks", [1, 4])
def test_auto_offloads_what_a_gpu_has_no_room_for(ranks: int) -> None:
    found = auto(ranks, 8e9 * ranks, "cuda", 80 * GB)
    assert (found.name, found.settings.fsdp.cpu_offload) == ("fsdp", True)
    assert "offloaded" in found.reason


def test_auto_says_so_where_nothing_fits_a_cpu() -> None:
    found = auto(1, 8e9, "cpu", 16 * GB)
    assert found.name == "torch"
    assert "no backend needs less" in found.reason


def test_torch_with_ranks_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"trainer\.ranks: the backend torch supports one process, but .* is 2 .*fsdp, deepspeed or auto",
    ):
        choose_backend(TrainerSettings(ranks=2), 1, CPU)


def test_deepspeed_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"deepspeed is not installed -> pip install 'areal-like\[deepspeed\]'"):
        choose_backend(TrainerSettings(backend="deepspeed"), 1, CPU)


def test_zero_options_are_passed_on_and_raw_ones_merged() -> None:
    settings = TrainerSettings(
        device="cpu",
        backend="deepspeed",
        deepspeed={  # type: ignore[arg-type]
            "stage": 3, "offload_optimizer": True, "reduce_bucket_size": 1000,
            "raw": {"zero_optimization": {"round_robin_gradients": True}, "comms_logger": {"enabled": True}},
        },
    )  # fmt: skip
    made = zero_config(settings)
    assert made["zero_optimization"]["stage"] == 3
    assert made["zero_optimization"]["reduce_bucket_size"] == 1000
    assert made["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert made["zero_optimization"]["round_robin_gradients"] is True
    assert made["comms_logger"] == {"enabled": True}
    assert made["gradient_clipping"] == settings.optimizer.max_grad_norm
    assert "offload_param" not in made["zero_optimization"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"gradient_clipping": 2.0}, "gradient_clipping is derived from the trainer's other settings"),
        ({"bf16": {"enabled": True}}, "bf16 is derived from the trainer's other settings"),
        ({"zero_optimisation": {}}, "no key zero_optimisation; did you mean zero_optimization"),
        ({"zero_optimization": {"stage": 1}}, "without `stage`"),
    ],
)
def test_raw_options_that_are_ours_or_unknown_are_refused(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=words):
        TrainerSettings(deepspeed={"raw": raw})  # type: ignore[arg-type]


def test_an_option_zero_does_not_know_is_reported_with_the_nearest_one() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from trainer.backends.zero import _refusal

    with pytest.raises(pydantic.ValidationError) as refused:
        DeepSpeedZeroConfig(stage=2, reduce_bucket_sise=5)
    words = str(_refusal(refused.value))
    assert "ZeRO does not accept reduce_bucket_sise" in words
    assert "did you mean reduce_bucket_size?" in words
