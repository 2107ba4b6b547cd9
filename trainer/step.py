"""One training step: takes a prepared batch, updates the weights and returns metrics.

It defines the order of passes (proximal log-probs, then mini-batches of micro-batches), applies updates, and combines
metrics over ranks. How the policy is distributed over ranks is defined in backends/. Skipped updates are counted; the
caller decides what to do about them.

Order. `prepare` is CPU work without the model and may run in another thread while `run` computes the previous step.
`run`: with several updates and `proximal: recompute`, the log-probs of the whole batch are computed once before its
first update. With a single update this pass is omitted: the policy has not changed yet when its only gradient is
computed, so p = sg(c) bit for bit, u = 1, and w = exp(c - b). `behaviour` and `interpolate` never need it.
A loss or correction that needs statistics of the whole step always gets that pass.
Sequences without an advantage have no gradient, unless the loss needs them (`Needs.every_sequence`): micro-batches that
contain only such sequences get no backward pass.
A further pass over the batch (`passes_per_batch`) uses the same mini-batches in the same order, with the advantages,
proximal log-probs and statistics from the start of the step.
With `version_logprobs` a step begins with the log-probs of each token under the version that sampled it
(version_recall.py).
With a critic a step begins with its values, from which the advantages are computed; then policy and critic alternate
with their passes and updates. While only the critic is trained (its warm-up), the policy's passes serve the metrics.

Deterministic: on a CPU the same model, batch and settings give the same bits. On CUDA this requires
`torch.use_deterministic_algorithms(True)`; without it the flash kernels' backward pass adds in an arbitrary order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError
from areal_like.settings import DType
from areal_like.wire.messages import BatchSample
from trainer.backends.policy_module import policy_logprobs
from trainer.backends.port import Backend, FixedPolicy, Setup
from trainer.critic import Critic, update_metrics
from trainer.data.batch import MicroBatch, PreparedBatch, prepare_batch
from trainer.gradient_cosine import GradientCosine
from trainer.gradient_norms import square_norms
from trainer.lr_by_ess import LrByEss
from trainer.model import agreement
from trainer.model.attention import AttentionChoice, attach
from trainer.model.experts import attach_experts
from trainer.model.lora import adapter_off
from trainer.model.router_replay import attach_replay
from trainer.objectives.loss import policy_loss
from trainer.objectives.loss_sums import LossSums
from trainer.objectives.own_code import is_own
from trainer.objectives.port import Sequences, TokenInputs
from trainer.objectives.registry import advantage_of, loss_of, needs_reference
from trainer.objectives.step_statistics import needs_statistics, step_statistics
from trainer.objectives.trial import try_loss
from trainer.optimizer import UpdateResult
from trainer.step_advantages import Place, step_advantages
from trainer.version_recall import VersionRecall

Result = TypeVar("Result")


class Spans(Protocol):
    """The part of areal_like.trace.Tracer used here."""

    def span(self, name: str, lane: str = "main", **args: Any) -> contextlib.AbstractContextManager[Any]:
        """Time a block."""


def ready_model(model: PreTrainedModel, setup: Setup) -> float:
    """Switch a full model, not yet distributed, to training, and check on it that packed log-probs are right.

    Returns the largest difference, in nats. Raises UserError if it is too large. A model that is still on the host and
    will be distributed over GPUs is checked with the host's kernel.
    """
    _switch_to_training(model, setup)
    choice = setup.attention if model.device.type == setup.ranks.device.type else AttentionChoice("sdpa", "on the host")
    disagreement_nats = agreement.check(model, choice, setup.compute_dtype, setup.temperature, setup.max_context)
    attach(model, setup.attention)
    if setup.settings.router_replay:
        attach_replay(model)
    return disagreement_nats


def ready_outline(model: PreTrainedModel, setup: Setup) -> None:
    """Switch a model without parameters to training; its backend checks it once each rank has its part."""
    _switch_to_training(model, setup)
    attach(model, setup.attention)
    if setup.settings.router_replay:
        attach_replay(model)


def ready_critic(model: PreTrainedModel, setup: Setup) -> None:
    """Switch a critic to training. It uses the policy's attention, which has been checked already."""
    _switch_to_training(model, setup)
    attach(model, setup.attention)
    attach_experts(model)


def _switch_to_training(model: PreTrainedModel, setup: Setup) -> None:
    model.eval()
    if setup.settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers recomputes activations in training mode only; agreement.check sees dropout


class TrainStep:
    """Trains policy version n - 1 to version n on one batch. Created once per process.

    `reference` is required if the loss needs it (kl_coef > 0). It never changes: a full model on every rank, or one
    that is distributed over the ranks, as `teacher` is; with an adapter (`trainer.lora`) the policy without it is the
    reference. `teacher` is given if `trainer.teacher.path` is set; log-probs of `trainer.teacher.model` come with the
    samples. `critic` is given if `trainer.critic` is set. `before_update()` is called before weights and optimizer
    change. `version_dtype`: of the weights that engines receive. Raises UserError if a user's loss cannot be used.
    """

    def __init__(
        self,
        policy: Backend,
        setup: Setup,
        *,
        groups_per_step: int,
        reference: PreTrainedModel | FixedPolicy | None = None,
        teacher: PreTrainedModel | FixedPolicy | None = None,
        critic: Critic | None = None,
        tracer: Spans | None = None,
        before_update: Callable[[], None] = lambda: None,
        version_dtype: DType = "float32",
    ) -> None:
        settings = setup.settings
        if is_own(settings.loss.kind) or any(is_own(one.kind) for one in settings.loss.corrections):
            try_loss(settings.loss)
        self._loss = loss_of(settings.loss)
        is_held = needs_reference(settings.loss, settings.advantage)
        if is_held and reference is None and settings.lora is None:
            what = "the loss or the advantage requires a reference model, which cannot be emulated"
            remedy = "train on real devices, or use settings that require no reference model, such as kl_coef: 0"
            raise UserError(what, where="trainer.loss", remedy=remedy)
        assert (critic is None) == (settings.critic is None)
        self.policy, self.critic, self.settings = policy, critic, settings
        self.groups_per_step = groups_per_step
        self.reference = reference if is_held else None
        self.teacher = teacher
        self.device = setup.ranks.device
        self._setup, self._ranks = setup, setup.ranks
        self._tracer, self._before_update = tracer, before_update
        self._lr_by_ess = None if settings.lr_by_ess is None else LrByEss(settings.lr_by_ess, self._ranks)
        self._recall = None
        if settings.version_logprobs is not None:
            self._recall = VersionRecall(
                policy, setup, dtype=version_dtype, fence=before_update, needs=self._loss.needs
            )
        self._cosine = None
        if settings.gradient_cosine is not None:
            self._cosine = GradientCosine(settings.gradient_cosine, policy, self._ranks)
        self._advantage, self._advantage_options = advantage_of(settings.advantage)
        is_weighted = settings.loss.weight.mode != "off" or any(one.is_weight for one, _ in self._loss.corrections)
        is_unweighted = settings.loss.proximal == "behaviour" or self._advantage.is_for_any_policy
        assert is_weighted or is_unweighted, "a decoupled loss needs a weight"
        is_held = self._advantage.needs_teacher and not settings.teacher_model
        assert (teacher is not None) == is_held, "a teacher and its advantage go together"
        self._always_recompute = False
        self.watcher: Callable[[], None] = lambda: None
        """Called before each update, when its gradient is complete and not clipped yet."""
        for fixed in (self.reference, self.teacher):
            if isinstance(fixed, PreTrainedModel):  # a distributed one was checked when it was made
                fixed.eval().requires_grad_(False)
                agreement.check(fixed, setup.attention, setup.compute_dtype, setup.temperature, setup.max_context)

    def prepare(self, samples: Sequence[BatchSample], version: int) -> PreparedBatch:
        """Pack this rank's part of `samples` for the step that starts from policy `version` (step n: n - 1).

        Uses no model; may run on any thread.
        """
        with self._span("pack", lane="prepare"):
            ranks = self._ranks
            prepared = prepare_batch(
                samples, version, self.settings, rank=ranks.share, num_ranks=ranks.num_shares,
                is_copy=not ranks.is_share_counted,
            )  # fmt: skip
        assert prepared.metrics["groups"] <= self.groups_per_step, "a batch of more groups than a step has"
        return prepared

    def remember(self, version: int) -> None:
        """Keep the current policy as `version`, if later steps may have tokens that it sampled."""
        if self._recall is not None:
            self._recall.remember(version)

    def run(self, prepared: PreparedBatch) -> dict[str, float]:
        """Run one step, by all ranks together; returns its metrics, the same on each. Weights change in place."""
        sums: LossSums | None = None
        updates: list[UpdateResult] = []
        critic = self.critic
        if self._recall is not None:
            with self._span("versions"):
                prepared = self._recall.look(prepared)
        proximal = self._proximal(prepared)
        prepared = self._with_step_advantages(prepared, proximal)
        is_policy_trained = critic is None or not critic.is_alone(prepared.step)
        if critic is not None:
            critic.begin(prepared)
        if self._lr_by_ess is not None:
            self._lr_by_ess.begin(len(prepared.rewards.lengths_Q))
        if self._cosine is not None:
            self._cosine.begin(prepared.step)
        statistics = self._statistics(prepared, proximal)
        num_passes = self.settings.passes_per_batch
        order = list(enumerate(prepared.mini_batches)) * num_passes
        for update, (number, mini_batch) in enumerate(order):
            self._zero_grad()
            for place, micro_batch in enumerate(mini_batch):
                with self._span("micro_batch", mini_batch=number, tokens=micro_batch.packed.num_tokens):
                    is_last = place == len(mini_batch) - 1
                    micro_batch = self._placed(micro_batch, is_policy_trained)
                    part = self._backward(micro_batch, proximal.get((number, place)), statistics, is_last=is_last)
                    if critic is not None:
                        critic.backward(micro_batch, is_last=is_last)
                sums = part if sums is None else sums.plus(part)
            with self._span("update", mini_batch=number):
                self.watcher()
                self._before_update()
                if is_policy_trained:
                    if self._cosine is not None:
                        self._cosine.look(is_last=update == len(order) - 1)
                    lr_factor = 1.0 if self._lr_by_ess is None else self._lr_by_ess.factor()
                    updates.append(self.policy.update(prepared.step, lr_factor=lr_factor))
                if critic is not None:
                    critic.update(prepared.step)
        assert sums is not None
        metrics = {**sums.over(self._ranks).metrics(len(prepared.mini_batches) * num_passes), **update_metrics(updates)}
        more = {} if self._lr_by_ess is None else self._lr_by_ess.metrics()
        if self._recall is not None:
            more |= self._recall.metrics()
        if self._cosine is not None:
            more |= self._cosine.metrics()
        return {**prepared.metrics, **metrics, **more, **({} if critic is None else critic.metrics())}

    def _zero_grad(self) -> None:
        self.policy.zero_grad()
        if self.critic is not None:
            self.critic.zero_grad()

    def _placed(self, micro_batch: MicroBatch, is_policy_trained: bool) -> MicroBatch:
        """Move a micro-batch to the device, without a backward pass of the policy if it is not trained."""
        moved = micro_batch.to(self.device)
        return moved if is_policy_trained else replace(moved, is_silent=True)

    def _with_step_advantages(self, prepared: PreparedBatch, proximal: Mapping[Place, torch.Tensor]) -> PreparedBatch:
        """Return the batch with the advantages that need a model's passes: the reference, the critic or the policy."""
        loss, references, values, starts = self.settings.loss, None, None, None
        teachers, square_norms_B = None, None
        if (loss.kl_coef > 0 and loss.kl_in == "reward") or self._advantage.needs_reference:
            with self._span("reference"), torch.no_grad():
                references = self._of_each(prepared, self._reference_logprobs)
        if self.critic is not None:
            with self._span("values"):
                values = self._of_each(prepared, self.critic.values)
        if self._advantage.needs_starts:
            starts = proximal
            if self.teacher is not None:
                with self._span("teacher"), torch.no_grad():
                    teachers = self._of_each(prepared, self._teacher_logprobs)
            if self._advantage.needs_norms(self._advantage_options):
                with self._span("gradient_norms"):
                    square_norms_B = square_norms(prepared, self.policy, self._ranks)
        if references is None and values is None and starts is None:
            return prepared
        return step_advantages(
            prepared, self.settings, self._ranks, references=references, values=values, starts=starts,
            teachers=teachers, square_norms_B=square_norms_B,
        )  # fmt: skip

    def _of_each(self, prepared: PreparedBatch, compute: Callable[[MicroBatch], Result]) -> dict[Place, Result]:
        """Return the result of `compute` for each micro-batch, on the device, by its place."""
        return {
            (number, place): compute(micro_batch.to(self.device))
            for number, mini_batch in enumerate(prepared.mini_batches)
            for place, micro_batch in enumerate(mini_batch)
        }

    def _proximal(self, prepared: PreparedBatch) -> dict[tuple[int, int], torch.Tensor]:
        """Log-probs of the whole batch under the policy at the start of the step, by (mini-batch, micro-batch)."""
        num_updates = len(prepared.mini_batches) * self.settings.passes_per_batch
        is_needed = num_updates > 1 or self._always_recompute
        # with recalled versions, staleness is measured against the start of the step
        is_needed = is_needed and (self.settings.loss.proximal == "recompute" or self._recall is not None)
        is_needed = is_needed or self._advantage.needs_starts
        if not is_needed and not needs_statistics(self._loss):
            return {}
        with self._span("proximal"), torch.no_grad():
            return self._of_each(prepared, lambda one: self._logprobs(one, with_entropy=False)[0])

    def _reference_logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        if self.settings.lora is not None:
            packed = replace(micro_batch.packed, routes_TLK=None)  # recorded for the policy, which shares the model
            with adapter_off(self.policy.model):
                return self.policy.logprobs(packed, with_entropy=False)[0]
        return self._fixed_logprobs(self.reference, micro_batch)

    def _teacher_logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        return self._fixed_logprobs(self.teacher, micro_batch)

    def _fixed_logprobs(self, model: PreTrainedModel | FixedPolicy | None, micro_batch: MicroBatch) -> torch.Tensor:
        assert model is not None
        if not isinstance(model, PreTrainedModel):
            return model.logprobs(micro_batch.packed)
        return policy_logprobs(model, micro_batch.packed, self._setup, with_entropy=False)[0]

    def _statistics(
        self, prepared: PreparedBatch, proximal: Mapping[tuple[int, int], torch.Tensor]
    ) -> dict[str, Mapping[str, float]]:
        """Return the statistics of the whole step that the loss and corrections need."""
        if not needs_statistics(self._loss):
            return {}
        parts = [
            self._inputs(micro_batch.to(self.device), proximal[number, place])
            for number, mini_batch in enumerate(prepared.mini_batches)
            for place, micro_batch in enumerate(mini_batch)
            if micro_batch.is_counted
        ]
        return step_statistics(self._loss, parts, self._sum_over_ranks)

    def _sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        summed: list[float] = self._ranks.sum(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()
        return summed

    def _inputs(self, micro_batch: MicroBatch, proximal_N: torch.Tensor | None) -> TokenInputs:
        """Return the inputs of the loss, except those of the current policy. On the device."""
        packed, inputs = micro_batch.packed, replace(micro_batch.inputs, proximal_N=proximal_N)
        if self._loss.needs.sequences:
            inputs = replace(inputs, sequences=Sequences(packed.sequence_N, len(packed.lengths)))
        return inputs

    def _backward(
        self,
        micro_batch: MicroBatch,
        proximal_N: torch.Tensor | None,
        statistics: Mapping[str, Mapping[str, float]] | None = None,
        *,
        is_last: bool,
    ) -> LossSums:
        micro_batch = micro_batch.to(self.device)
        inputs = replace(self._inputs(micro_batch, proximal_N), step=statistics or {})
        if self._loss.needs.reference:
            with torch.no_grad():
                inputs = replace(inputs, reference_N=self._reference_logprobs(micro_batch))
        with torch.set_grad_enabled(not micro_batch.is_silent):
            current_N, entropy_N = self._logprobs(micro_batch, with_entropy=True)
            assert entropy_N is not None
            if not self._loss.needs.entropy:
                entropy_N = entropy_N.detach()
            loss, sums = policy_loss(current_N, entropy_N, inputs, self.settings.loss, self._loss)
        if self._lr_by_ess is not None:
            self._lr_by_ess.add(micro_batch, current_N)
        if not micro_batch.is_silent:
            self.policy.backward(loss, is_last=is_last)
        return sums if micro_batch.is_counted else sums.emptied()

    def _logprobs(self, micro_batch: MicroBatch, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.policy.logprobs(micro_batch.packed, with_entropy=with_entropy)

    def _span(self, name: str, lane: str = "main", **args: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._tracer is None else self._tracer.span(name, lane, **args)
