"""Replays recorded steps: the Training of a run, fed with recorded batches instead of the controller's.

It runs the steps and reports what came out; controller/runs/replay compares that with the record.

The process asks for one batch at a time and reads nothing before it has asked, so that neither side of the two pipes
waits for the other. Events are JSON lines with a `kind`:
  opened    version
  want      step: the batch of this step is read next from stdin
  step      step, metrics, seconds; gradients, if they are wanted: SHA-256 by tensor, one table for each update;
            off_policy, if a least effective sample size is given: see trainer/off_policy.py
  refused   step, off_policy: the effective sample size of this step is too small; nothing follows
  saved     version, folder of the checkpoint
  policy    version, folder of its weights, in the dtype of published versions; the reader deletes it
  exported  folder of the policy
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch

from areal_like.wire.batch_stream import read_batch
from trainer.off_policy import off_policy
from trainer.replay.spec import ReplaySpec
from trainer.training import Training
from trainer.weights.publish import tensor_bytes

Event = dict[str, Any]


def play(spec: ReplaySpec, batches: BinaryIO, say: Callable[[Event], None]) -> None:
    """Run the steps up to `spec.last_step`.

    Args:
        spec: where to start and what to keep.
        batches: the recorded batches, in order; each is read after a `want`.
        say: takes the events.

    Raises:
        UserError, WeightError: the starting model or checkpoint cannot be used.
        WireError: a batch cannot be read.
        PolicyDiverged: as in the run itself.
    """
    training = Training(spec.trainer)
    training.open()
    say({"kind": "opened", "version": training.version})
    digests: list[dict[str, str]] = []
    if spec.has_gradients:
        training.watch_gradients(lambda gradients: digests.append(_digests(gradients)))
    _write_if_wanted(training, spec, say)
    while training.version < spec.last_step:
        step = training.version + 1
        say({"kind": "want", "step": step})
        batch = read_batch(batches)
        started_s = time.perf_counter()
        prepared, fit = training.prepare(batch.samples, step), None
        if spec.min_ess is not None:
            fit = off_policy(prepared, training.policy, training.ranks.device)
            if not fit["ess"] >= spec.min_ess:
                say({"kind": "refused", "step": step, "off_policy": fit})
                return training.close()
        metrics = training.run(prepared)
        event = {"kind": "step", "step": step, "metrics": metrics, "seconds": time.perf_counter() - started_s}
        if fit is not None:
            event["off_policy"] = fit
        if spec.has_gradients:
            event["gradients"] = list(digests)
            digests.clear()
        say(event)
        _write_if_wanted(training, spec, say)
    if spec.has_export:
        say({"kind": "exported", "folder": str(training.export())})
    training.close()


def _write_if_wanted(training: Training, spec: ReplaySpec, say: Callable[[Event], None]) -> None:
    if training.version in spec.policies_at:
        exported = training.export()
        folder = exported.rename(exported.with_name(f"policy_{training.version:06d}"))
        say({"kind": "policy", "version": training.version, "folder": str(folder)})
    if training.version in spec.saves_at:
        saved = training.save()()
        say({"kind": "saved", "version": training.version, "folder": str(saved.folder)})


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of the bytes of each tensor."""
    found = {}
    for name, tensor in sorted(tensors.items()):
        data = tensor_bytes(tensor).data
        found[name] = hashlib.sha256(data).hexdigest()
    return found
