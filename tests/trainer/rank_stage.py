"""Scenes of a made-up trainer with several ranks: a prepared model, recorded batches, and processes that train on them.

The processes are rank_job.py's. Tests import this as a module (conftest.py adds this folder to the path).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked_jobs import ForkedJob, JobServer
from transformers import PreTrainedModel

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.wire.encoding import encode
from areal_like.wire.messages import Batch, BatchSample
from trainer.checkpoints import checkpoint
from trainer.checkpoints.convert import Stored, stored_optimizer, stored_tensors
from trainer.export import write_model
from trainer.model.stored_tensor import as_tensor
from trainer.model.tokenizers import build_tokenizer
from trainer.training import Training

JOB = Path(__file__).with_name("rank_job.py")
STEPS, HALF = 10, 5
LIMIT_S = 550.0
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01, "max_grad_norm": 0.5},
    "mini_batches": 2, "micro_batch_tokens": 48, "rank_timeout_s": 120.0,
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def saved_tensors(stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, of one process or in the parts of ranks."""
    return {name: as_tensor(one) for name, one in stored.items()}


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The policy in a checkpoint."""
    return saved_tensors(stored_tensors(folder))


class Stage:
    """A prepared model and recorded batches, and scenes played on them."""

    def __init__(
        self, folder: Path, model: PreTrainedModel, batches: list[list[BatchSample]], server: JobServer
    ) -> None:
        self.folder, self.server = folder, server
        self.prepared = folder / "prepared"
        self.prepared.mkdir()
        write_model(model, self.prepared, dtype="float32")
        build_tokenizer("characters:running_sum", None).save_pretrained(self.prepared)
        (self.prepared / "generation_config.json").write_text('{"eos_token_id": 2}')
        self.batches = batches
        self.num_meetings = 0
        self.single_metrics: dict[str, list[dict[str, float]]] = {}
        """Of `single`, by name."""
        for step, samples in enumerate(batches, 1):
            frames = encode(Batch(step=step, lineage="l0", samples=tuple(samples)))
            named = {f"frame-{index}": np.frombuffer(frame, np.uint8) for index, frame in enumerate(frames)}
            np.savez(folder / f"batch-{step}.npz", **named)

    def meeting(self) -> str:
        """A file, as on one machine, or a port, as on a cluster: in turns."""
        self.num_meetings += 1
        return (
            f"file://{self.folder}/ranks-{self.num_meetings}"
            if self.num_meetings % 2
            else f"tcp://127.0.0.1:{free_port()}"
        )

    def spec(self, name: str, ranks: int, settings: dict[str, Any], **changes: Any) -> ProcessSpec:
        facts: dict[str, Any] = {
            "role": "trainer", "name": "trainer", "run_id": "t", "run_dir": str(self.folder / name),
            "hub_address": "tcp://127.0.0.1:1", "parent_pid": os.getpid(), "seed": 1,
            "model": ModelSettings(path=str(self.prepared)), "sampling": SamplingSettings(temperature=0.9),
            "staleness": StalenessSettings(), "groups_per_step": 7, "group_size": 4, "num_steps": STEPS,
            "weight_dir": str(self.folder / name / "weights"), "num_ranks": ranks,
            "ranks_address": self.meeting(),
            "settings": {**SETTINGS, "ranks": ranks, "weights": {"kind": "disk"}, **settings},
        }  # fmt: skip
        return ProcessSpec(**{**facts, **changes})

    def start(self, name: str, ranks: int, scenes: list[dict[str, Any]]) -> list[ForkedJob]:
        job = self.folder / f"{name}.json"
        for scene in scenes:
            Path(scene["spec"]["run_dir"]).mkdir(parents=True, exist_ok=True)
        job.write_text(json.dumps(scenes))
        return [
            self.server.start("rank_job", [str(job), str(rank)], self.folder / f"{name}-{rank}.log")
            for rank in range(ranks)
        ]

    def log(self, name: str, rank: int) -> str:
        return (self.folder / f"{name}-{rank}.log").read_text(errors="replace")

    def play(self, name: str, ranks: int, scenes: list[dict[str, Any]]) -> None:
        processes = self.start(name, ranks, scenes)
        try:
            for rank, process in enumerate(processes):
                assert process.wait(LIMIT_S) == 0, self.log(name, rank)
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def scene(self, name: str, ranks: int, settings: dict[str, Any], **facts: Any) -> dict[str, Any]:
        resume_from = facts.pop("resume_from", None)
        spec = self.spec(name, ranks, settings, resume_from=str(resume_from) if resume_from else None)
        return {"spec": spec.model_dump(mode="json"), "until": STEPS, "num_batches": STEPS, **facts}

    def at(self, name: str, version: int) -> Path:
        return checkpoint.checkpoint_folder(self.folder / name, version)

    def metrics(self, name: str) -> list[dict[str, float]]:
        return json.loads((self.folder / name / "result.json").read_text())["metrics"]

    def state(self, name: str, version: int = STEPS) -> dict[str, torch.Tensor]:
        """Weights and moments of a checkpoint."""
        folder = self.at(name, version)
        tensors = {**saved_weights(folder), **saved_tensors(stored_optimizer(folder))}
        return {key: value for key, value in tensors.items() if not key.startswith("generator")}

    def single(
        self, name: str, resume_from: Path | None = None, until: int = STEPS, **settings: Any
    ) -> list[dict[str, float]]:
        """The same on plain torch, in this process."""
        training = Training(self.spec(name, 1, settings, resume_from=str(resume_from) if resume_from else None))
        training.open()
        metrics = []
        while training.version < until:
            step = training.version + 1
            metrics.append(training.run(training.prepare(self.batches[step - 1], step)))
            if step in (HALF, until):
                training.save()()
        training.close()
        self.single_metrics[name] = metrics
        return metrics
