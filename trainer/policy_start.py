"""Loads the policy, and policies that are not trained, in the form that the backend takes: in full, or in parts.

A backend that reads parts gets a model on the meta device and a source of its parameters. A folder that cannot be read
in parts (trainer/model/outline.py), and a base with an adapter, are loaded in full on every rank and then distributed.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from areal_like.import_path import import_factory
from trainer.backends.choice import make_backend
from trainer.backends.descriptor import KIND_KEY, BackendDescriptor
from trainer.backends.port import Backend, FixedPolicy, PartsBackend, Setup
from trainer.backends.registry import find_backend
from trainer.config import TrainerSettings
from trainer.model.model import check_folder, load_causal_lm
from trainer.model.outline import SlicedSource, outline, sliced_source
from trainer.model.sequence_group import check_heads
from trainer.model.tensor_split import check_split
from trainer.peer_errors import peer_errors_as_rank_lost
from trainer.step import ready_model, ready_outline

log = logging.getLogger(__name__)


def load_policy(
    folder: Path, settings: TrainerSettings, *, device: str, is_whole: bool
) -> tuple[PreTrainedModel, SlicedSource | None]:
    """Load the model to train: in full on `device`, or on the meta device with the source of its parameters.

    is_whole: never in parts. Raises UserError.
    """
    if not is_whole and find_backend(settings.backend).reads_parts(settings):
        model = outline(folder)
        source = sliced_source(folder, model, settings.bucket_bytes)
        if source is not None:
            return model, source
        log.warning("%s cannot be read in parts, so every rank loads the full model before it is distributed", folder)
    return load_causal_lm(folder, device=device), None


def ready_backend(descriptor: BackendDescriptor, model: PreTrainedModel, setup: Setup) -> tuple[Backend, float]:
    """Create the backend of `load_policy`'s model, and check that packed log-probs are the model's own. Collective.

    Returns the largest difference in nats as well. Raises UserError.
    """
    if setup.source is None:
        disagreement_nats = ready_model(model, setup)
        with peer_errors_as_rank_lost("loading the model"):
            return make_backend(descriptor, model, setup), disagreement_nats
    ready_outline(model, setup)
    with peer_errors_as_rank_lost("loading the model"):
        backend = make_backend(descriptor, model, setup)
        assert isinstance(backend, PartsBackend)
        return backend, backend.check()


def load_fixed(
    folder: Path, descriptor: BackendDescriptor, setup: Setup, *, device: str
) -> PreTrainedModel | FixedPolicy:
    """Load a policy that is not trained: distributed like the trained one if the backend can, else in full on `device`.

    Collective. Raises UserError.
    """
    if setup.ranks.splits_matrices:  # a teacher's may differ from the policy's
        check_split(check_folder(folder), setup.settings.tensor_parallel)
    if (group := setup.ranks.sequence_group) is not None:
        check_heads(check_folder(folder).get_text_config().num_attention_heads, group.size)
    if descriptor.fixed_factory:
        model = outline(folder)
        source = sliced_source(folder, model, setup.settings.bucket_bytes)
        if source is not None:
            with peer_errors_as_rank_lost("loading a model that is not trained"):
                made: FixedPolicy = import_factory(descriptor.fixed_factory, KIND_KEY)(
                    model, replace(setup, source=source)
                )
            return made
    return load_causal_lm(folder, device=device)
