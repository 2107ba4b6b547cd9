"""Opens the model of a run from files for training: the starting model, or that of a checkpoint.

It selects the folder, checks that packed log-probs are right, and writes trainer.json.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import PretrainedConfig

from areal_like.errors import WeightError
from areal_like.scored_text import padding_id
from trainer.adapter import check_kind
from trainer.backends.choice import choose_backend, make_backend
from trainer.backends.port import OfflineBackend, Setup
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointState
from trainer.config import TrainerSettings
from trainer.model.attention import choose, register
from trainer.model.model import load_causal_lm, model_context, num_parameters
from trainer.model.reward_model import load_reward_model
from trainer.model.tokenizers import load_tokenizer
from trainer.offline.adapter import OfflineAdapter
from trainer.offline.config import OfflineTrainerSettings
from trainer.offline.spec import OfflineSpec
from trainer.prepare import prepare
from trainer.prepare_spec import PrepareSpec
from trainer.ranks import Ranks, own_device
from trainer.step import ready_critic, ready_model
from trainer.training_state import ModelFiles, PolicyFiles, check_architecture

log = logging.getLogger(__name__)

PREPARE_S = 3600.0
"""Longest time in which rank 0 prepares the starting model or writes a file while the others wait."""
START = "start"
"""Subfolder of the run for the starting model, if it had to be created."""


def starting_folder(spec: OfflineSpec) -> Path:
    """Return the starting model as a Hugging Face folder with its tokenizer: `model.path` itself, or a folder that is
    created in the run's folder the first time. Raises UserError."""
    model = spec.model
    if model.path is not None and model.tokenizer == "from_model" and Path(model.path).expanduser().is_dir():
        return Path(model.path).expanduser().resolve()
    target = Path(spec.run_dir) / START
    if not (target / "config.json").is_file():
        prepare(
            PrepareSpec(
                name=spec.name, run_id=spec.run_id, parent_pid=spec.parent_pid, seed=spec.seed, model=model,
                out_dir=str(target), num_threads=spec.num_threads,
            )
        )  # fmt: skip
    return target


def newest_checkpoint(run_dir: Path) -> tuple[Path, CheckpointState] | None:
    """Return the newest checkpoint whose files are intact; None if there is none."""
    checkpoint.repair(run_dir)
    for _, folder in reversed(checkpoint.all_checkpoints(run_dir)):
        try:
            checkpoint.verify(folder)
            return folder, checkpoint.read_state(folder)
        except WeightError as error:
            log.warning("%s; continuing from the previous checkpoint", error)
    return None


def trainer_settings(settings: OfflineTrainerSettings) -> TrainerSettings:
    """Convert the settings to those of backends."""
    shared = set(OfflineTrainerSettings.model_fields) & set(TrainerSettings.model_fields)
    facts = settings.model_dump(include=shared)
    if settings.lora is not None:
        facts["lora"] = settings.lora.model_dump(exclude={"export"})
    return TrainerSettings.model_validate(facts)


def longest_sequence(config: PretrainedConfig, max_tokens: int) -> int:
    """Return the longest allowed sequence: data.max_tokens, and at most the number of the model's positions."""
    limit = model_context(config)
    return max_tokens if limit is None else min(max_tokens, limit.tokens)


@dataclass(frozen=True)
class Opened:
    """A model in training, with its setup and files."""

    policy: OfflineBackend
    setup: Setup
    files: PolicyFiles
    adapter: OfflineAdapter | None
    attention_words: str


def join_ranks(spec: OfflineSpec) -> Ranks:
    """Join the other ranks, at first of all: they wait for rank 0 while it prepares the starting model."""
    timeout_s = spec.trainer.rank_timeout_s
    return Ranks.join(spec, spec.trainer.device, timeout_s=timeout_s, order_timeout_s=max(timeout_s, PREPARE_S))


def open_model(
    spec: OfflineSpec, source: Path, start: Path, *, num_steps: int, max_context: int, ranks: Ranks | None
) -> Opened:
    """Load the model in `source` and check that it can be trained on packed sequences. Raises UserError.

    start: the starting model, which a checkpoint must match; the base of an adapter. ranks: those that this process has
    joined; None: it is alone, and joins a group of one if its backend needs it.
    """
    transformers.utils.logging.disable_progress_bar()
    register()
    lora, checkpoint_folder = spec.trainer.lora, None if source == start else source
    if checkpoint_folder is not None:
        check_kind(checkpoint_folder, lora)
        if lora is None:
            check_architecture(checkpoint_folder, start)
    weights = source if lora is None else start
    settings = trainer_settings(spec.trainer)
    device = own_device(settings.device, spec)
    model_device = "cpu" if spec.num_ranks > 1 else str(device)
    attention = choose(settings.attention, device, settings.precision)
    is_scoring = spec.objective == "reward_model"
    setup = Setup(settings, 1.0, num_steps, attention, ranks or Ranks.alone(device), max_context, is_critic=is_scoring)
    model = load_causal_lm(start if is_scoring else weights, device=model_device)
    disagreement_nats = ready_model(model, setup)
    if is_scoring:  # its passes are those of the causal model, which were checked above
        model = load_reward_model(weights, padding_id=padding_id(load_tokenizer(start)), device=model_device)
        ready_critic(model, setup)
    adapter = None
    if lora is not None:
        adapter = OfflineAdapter.add(
            model, lora, base=start, dtype=spec.model.dtype, seed=spec.seed, checkpoint=checkpoint_folder
        )
    num_trained, num_frozen = num_parameters(model, is_trained=True), num_parameters(model, is_trained=False)
    choice = choose_backend(settings, num_trained, device, num_frozen=num_frozen)
    if ranks is None and choice.descriptor.needs_process_group:
        ranks = join_ranks(spec)
    setup = replace(setup, settings=choice.settings, ranks=ranks or setup.ranks)
    files = ModelFiles.of(model) if adapter is None else adapter
    opened = Opened(
        cast(OfflineBackend, make_backend(choice.descriptor, model, setup)), setup, files, adapter,
        f"attention {attention.name} ({attention.reason})",
    )  # fmt: skip
    _record(
        spec,
        {
            "objective": spec.objective,
            "backend": choice.name,
            "backend_reason": choice.reason,
            "ranks": setup.ranks.size,
            "attention": attention.name,
            "attention_reason": attention.reason,
            "disagreement_nats": disagreement_nats,
            "device": str(device),
            "precision": settings.precision,
            "parameters": num_trained + num_frozen,
            "parameters_trained": num_trained,
        },
    )
    return opened


def _record(spec: OfflineSpec, chosen: dict[str, Any]) -> None:
    setup = {
        **chosen,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    log.info("setup: %s", setup)
    if spec.rank == 0:
        (Path(spec.run_dir) / "trainer.json").write_text(json.dumps(setup, indent=1) + "\n")
