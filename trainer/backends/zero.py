"""The policy sharded over ranks by DeepSpeed's ZeRO, stages 1 to 3.

It creates the engine without a compiler, runs its micro-batches and updates, and converts between its shards and full
tensors. DeepSpeed's checkpoints, data loaders and schedulers are not used: our checkpoints are the same for every
backend.

Parameters are float32 in the engine at any precision; the passes compute in the configured dtype by autocast, as with
plain torch. A ZeRO run therefore computes the same as one process, up to the order of sums.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import os
import warnings
from typing import Any

import pydantic
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError, first_line
from trainer.backends.policy_module import PolicyModule, both
from trainer.backends.port import MOMENTS, ReadMoments, Setup
from trainer.backends.zero_config import zero_config
from trainer.export import first_named
from trainer.host_copy import Part, whole_part
from trainer.model.packed import PackedSequences
from trainer.optimizer import UpdateResult, learning_rate, make_adamw
from trainer.ranks import Ranks


class ZeroBackend:
    """See trainer.backends.port.Backend."""

    def __init__(self, model: PreTrainedModel, setup: Setup) -> None:
        self.model, self._setup = model, setup
        self.skipped_updates = 0
        settings = setup.settings
        deepspeed = _import_deepspeed(setup.ranks)
        self._module = PolicyModule(model, setup).to(setup.ranks.device)
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._is_stage_3 = settings.deepspeed.stage == 3
        self._gathered = deepspeed.zero.GatheredParameters
        self._adamw = make_adamw(((p, p.ndim >= 2) for p in self._named.values()), settings.optimizer)
        if self._is_stage_3:
            head = model.get_output_embeddings()
            for parameter in head.parameters(recurse=False):  # our forward pass uses them, not the head's
                deepspeed.zero.register_external_parameter(self._module, parameter)
        try:
            self._engine, self._zero, _, _ = deepspeed.initialize(
                model=self._module, optimizer=self._adamw, config=zero_config(settings), dist_init_required=False
            )
        except pydantic.ValidationError as error:
            raise _refusal(error) from error
        self._module.train(model.training)
        self._start_moments()

    def logprobs(self, packed: PackedSequences, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return both(self._engine(packed, with_entropy))

    def zero_grad(self) -> None:
        pass  # the engine resets them after an update

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self._setup.ranks.size)  # it computes the mean over ranks, and we need the sum

    def update(self, step: int, *, lr_factor: float = 1.0) -> UpdateResult:
        lr = lr_factor * learning_rate(self._setup.settings.optimizer, step, self._setup.num_steps)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._engine.step()
        grad_norm = float(self._engine.get_global_grad_norm())
        is_applied = bool(self._engine.was_step_applied())
        self.skipped_updates += not is_applied
        return UpdateResult(grad_norm if is_applied else math.nan, lr, is_applied)

    # ------------------------------------------------------------ full tensors

    def move(self, device: torch.device) -> int:
        raise AssertionError("the state of DeepSpeed cannot be moved to another device")

    def full_weights(self) -> dict[str, torch.Tensor]:
        whole = {}
        for name, tensor in first_named(self.model).items():
            with self._gathered([tensor]) if hasattr(tensor, "ds_id") else contextlib.nullcontext():
                if self._setup.ranks.is_leader:
                    whole[name] = tensor.detach().clone() if self._is_stage_3 else tensor.detach()
        return whole

    def own_weights(self) -> dict[str, torch.Tensor]:
        assert not self._is_stage_3, "validate refuses it"
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def own_gradients(self) -> dict[str, torch.Tensor]:
        raise AssertionError("DeepSpeed does not provide its gradients")

    def parts(self) -> list[Part]:
        is_leader = self._setup.ranks.is_leader
        found = []
        for name, tensor in first_named(self.model).items():
            shard = getattr(tensor, "ds_tensor", None)
            if shard is not None:
                found += self._own_part(f"weight/{name}", tensor, shard)
            elif is_leader:  # the same on every rank
                found.append(whole_part(f"weight/{name}", tensor))
        num_updates = max(float(entry["step"]) for entry in self._adamw.state.values())
        if not num_updates:  # the same on every rank: all update together
            return found
        for name, parameter in self._named.items():
            for kind in MOMENTS:
                found += self._moment(f"{kind}/{name}", parameter, kind)
            if is_leader:
                found.append(whole_part(f"step/{name}", torch.tensor(num_updates)))
        return found

    def _moment(self, key: str, parameter: torch.nn.Parameter, kind: str) -> list[Part]:
        """Return this rank's part of a moment: with stages 1 and 2 any contiguous range of its items, often none."""
        from deepspeed.utils import safe_get_local_optimizer_state

        if self._is_stage_3:
            return self._own_part(key, parameter, safe_get_local_optimizer_state(parameter, kind))
        holder: Any = parameter  # DeepSpeed sets attributes on parameters
        mapping = holder._hp_mapping
        if mapping is None:
            return []
        return [Part(key, _shape(parameter), mapping.lp_fragment_address.start, mapping.get_hp_fragment(kind).detach())]

    def _own_part(self, key: str, parameter: torch.Tensor, padded: torch.Tensor) -> list[Part]:
        """Return this rank's part in stage 3: tensors are split like `parameter`, in equal ranges, the last padded."""
        holder: Any = parameter
        num = holder.ds_tensor.ds_numel
        start = min(self._setup.ranks.rank * num, holder.ds_numel)
        items = padded.detach().flatten()[: min(num, holder.ds_numel - start)]
        return [Part(key, _shape(parameter), start, items)]

    def load_moments(self, read: ReadMoments) -> None:
        entries = {name: entry for name in self._named if (entry := read(name))}
        if not entries:
            return
        num_updates = max(float(entry["step"]) for entry in entries.values())
        for state in self._adamw.state.values():
            state["step"].fill_(num_updates)
        for name, entry in entries.items():
            for kind in MOMENTS:
                self._set_moment(self._named[name], kind, entry[kind])

    def _start_moments(self) -> None:
        """Create AdamW's initial state before the first update.

        Stages 1 and 2 map it to parameters once, during the first update, when the second group of parameters
        (biases and norms) has no state yet (DeepSpeed 0.19.8).
        """
        zero = self._zero
        for shard in zero.fp32_partitioned_groups_flat if self._is_stage_3 else zero.single_partition_of_fp32_groups:
            self._adamw.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                **{kind: torch.zeros_like(shard.data) for kind in MOMENTS},
            }
        if not self._is_stage_3:
            zero._lazy_init_hp_params_optimizer_state()

    def _set_moment(self, parameter: torch.nn.Parameter, kind: str, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if not self._is_stage_3:
            safe_set_full_optimizer_state(parameter, value.to(parameter.device), kind)
            return
        holder: Any = parameter  # a sharded parameter has attributes that torch does not declare
        num, rank = holder.ds_tensor.ds_numel, self._setup.ranks.rank
        part = torch.zeros(num, dtype=torch.float32, device=holder.ds_tensor.device)
        own = value.flatten()[rank * num : (rank + 1) * num]
        part[: len(own)] = own.to(part.device)
        safe_set_local_optimizer_state(parameter, part, kind)


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the full parameter, even if this rank has only a part of it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _import_deepspeed(ranks: Ranks) -> Any:
    """Import DeepSpeed, configured not to compile on a CPU, where its shared-memory collectives are optional."""
    device = ranks.device
    # It reads its rank from the environment, although the process group exists already.
    os.environ |= {"LOCAL_RANK": str(device.index or 0), "RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)}
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise UserError(
            f"deepspeed cannot be imported ({first_line(error)})",
            where="trainer.backend",
            remedy="pip install 'areal-like[deepspeed]', or set trainer.backend: fsdp",
        ) from error
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl")
    return deepspeed


def _refusal(error: pydantic.ValidationError) -> UserError:
    """Convert DeepSpeed's error about an invalid option to a short message."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    near = difflib.get_close_matches(key, _zero_options(), n=1)
    hint = f"did you mean {near[0]}?" if near else "see DeepSpeed's documentation of zero_optimization"
    return UserError(f"ZeRO does not accept {key} ({first['msg']})", where="trainer.deepspeed.raw", remedy=hint)


def _zero_options() -> list[str]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
