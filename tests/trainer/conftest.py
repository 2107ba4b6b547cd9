"""Tiny models and made-up samples for the trainer's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_jobs import JobServer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from areal_like.trajectory import Segment, Trajectory
from areal_like.wire.messages import BatchSample
from controller.wiring.preload import PRELOAD
from trainer.export import write_model
from trainer.model.tokenizers import build_tokenizer

sys.path.append(str(Path(__file__).parent))  # makes the helpers of this folder importable

VOCABULARY = 61


@pytest.fixture(scope="session")
def job_server() -> Iterator[JobServer]:
    """What processes of these tests are forked from, one for each stream of tests: importing what a trainer needs takes
    more than most of them compute."""
    server = JobServer([*PRELOAD, "torch.distributed.fsdp"], Path(__file__).parent)
    yield server
    server.close()


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "granite": {"model_type": "granite", "num_key_value_heads": 2, "logits_scaling": 4.0},
    "cohere": {"model_type": "cohere", "num_key_value_heads": 2},
    "nanochat": {"model_type": "nanochat", "num_key_value_heads": 2},
}


@pytest.fixture(scope="session")
def made_model() -> Callable[..., PreTrainedModel]:
    """Make a two-layer model of a family; large initial weights, so that mistakes show."""

    def make(family: str = "qwen3", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
        keys: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **FAMILIES.get(family, {"model_type": family}),
            **changes,
        }
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), dtype=torch.float32)
        return model.eval()

    return make


@pytest.fixture
def tiny_model(made_model: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """The same for a single test."""
    return made_model


@pytest.fixture
def prepared(tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]) -> Path:
    """The folder of such a model and its tokenizer."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    write_model(tiny_model(), folder, dtype="float32")
    build_tokenizer("characters:running_sum", None).save_pretrained(folder)
    return folder


@pytest.fixture
def sequences() -> Callable[..., tuple[list[np.ndarray], list[np.ndarray]]]:
    """Make random token arrays of given lengths, the first three tokens being the prompt."""

    def make(lengths: Sequence[int], seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
        rng = np.random.default_rng(seed)
        tokens = [rng.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths]
        masks = [np.arange(length) >= min(3, length - 1) for length in lengths]
        return tokens, masks

    return make


@pytest.fixture(scope="session")
def made_samples() -> Callable[..., list[BatchSample]]:
    """Make samples of the given group sizes with random answers; versions rise along an answer up to `version`."""

    def make(group_sizes: Sequence[int], *, version: int = 3, seed: int = 0, max_answer: int = 12) -> list[BatchSample]:
        rng = np.random.default_rng(seed)
        samples = []
        for group_id, size in enumerate(group_sizes):
            prompt_P = rng.integers(3, VOCABULARY, int(rng.integers(2, 6))).astype(np.int32)
            for sample_index in range(size):
                length = int(rng.integers(1, max_answer + 1))
                answer = Segment(
                    rng.integers(3, VOCABULARY, length).astype(np.int32),
                    (-rng.exponential(3.0, length)).astype(np.float32),
                    np.sort(rng.integers(max(0, version - 2), version + 1, length)).astype(np.int32),
                )
                samples.append(
                    BatchSample(
                        group_id=group_id,
                        sample_index=sample_index,
                        trajectory=Trajectory.from_prompt(prompt_P, answer, "stop"),
                        reward=float(rng.integers(0, 3)),
                    )
                )
        return samples

    return make


@pytest.fixture
def make_samples(made_samples: Callable[..., list[BatchSample]]) -> Callable[..., list[BatchSample]]:
    """The same for a single test."""
    return made_samples
