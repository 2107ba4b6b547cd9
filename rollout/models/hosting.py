"""The models with separate weights in one rollout worker: their engines, and the replacement of copies of the policy.

Calls of one sample are in calls.py, the policy's versions in rollout/weights/versions.py.

Frozen models with the same base share an engine, in which each has its own adapter, or none.

A copy is replaced at a token boundary while its answers continue: each token is stamped with the version that sampled
it. If the policy is rolled back to an earlier version, so is the copy, and its running answers start again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.config import ProcessSpec
from areal_like.errors import UserError, WeightError
from rollout.config import RolloutSettings
from rollout.model_settings import MODELS_KEY, CalledModelSettings, by_engine
from rollout.models.external import ExternalModel
from rollout.tokens import load_tokenizer, stop_ids
from rollout.weights.versions import VersionGate

if TYPE_CHECKING:  # imports torch
    from rollout.engine.frozen import FrozenEngine

COUNTERS = ("busy_s", "logprobs", "logprobs_s", "swaps")
"""Counters of a model's engine that the worker reports."""
FROZEN_VERSION = 0
"""Version of a model that is never replaced."""

log = logging.getLogger(__name__)


class ModelHost:
    """One set of weights and its engine, for one copy of the policy, or for frozen models.

    models: those that it answers for. The engine has an adapter by the name of each model that declares one.
    """

    def __init__(
        self, models: Sequence[CalledModelSettings], engine: FrozenEngine, end_ids: tuple[int, ...]
    ) -> None:  # fmt: skip
        self.models, self.engine, self.end_ids = tuple(models), engine, end_ids
        self.names = ", ".join(model.name for model in models)
        self.refresh_every = models[0].refresh_every
        """Interval of a copy of the policy; None: frozen."""
        self.gate = VersionGate()
        """Set once there are weights."""
        self.num_failed = 0
        self.tokens: Counter[str] = Counter()
        """Number of tokens of the answers of each model."""

    async def start(self) -> None:
        """Allocate memory, and load weights that do not come with the policy's versions. Raises UserError,
        EngineError.
        """
        await self.engine.start()
        if self.refresh_every is None:
            try:
                await self.engine.load_folder(FROZEN_VERSION)
            except WeightError as error:
                raise UserError(str(error), where=f"{MODELS_KEY}: {self.names}") from error
            self.gate.set(FROZEN_VERSION)

    def is_due(self, version: int) -> bool:
        """Whether the copy must be replaced by this version of the policy."""
        every, now = self.refresh_every, self.engine.version
        return every is not None and (now < 0 or version < now or version // every > now // every)

    async def take(self, manifest_path: Path) -> None:
        """Copy a version of the policy. If it cannot be read, the copy stays unchanged until the next one."""
        try:
            report = await self.engine.load_version(manifest_path, "recompute")
        except WeightError as error:
            self.num_failed += 1
            log.warning(
                "model %s keeps version %d, because a newer version cannot be loaded: %s",
                self.names,
                self.engine.version,
                error,
            )
            return
        self.gate.set(report.version)
        log.info("model %s now uses version %d", self.names, report.version)


class ModelHosts:
    """The model hosts of one worker and its external models, by name, and the roles of the policy."""

    def __init__(
        self,
        declared: Sequence[CalledModelSettings] = (),
        hosts: Sequence[ModelHost] = (),
        teacher: str = "",
        external: Sequence[ExternalModel] = (),
        tokenizer: Any = None,
    ) -> None:
        self.teacher = teacher
        """Name of the model whose log-probs training samples get; empty: none."""
        self.declared: Mapping[str, CalledModelSettings] = {one.name: one for one in declared}
        self.each = tuple(hosts)
        """Every host once."""
        self.external: Mapping[str, ExternalModel] = {one.settings.name: one for one in external}
        self._tokenizer = tokenizer
        self.hosts: Mapping[str, ModelHost] = {model.name: host for host in hosts for model in host.models}
        """By the names of the models; models that share an engine have the same host."""

    @property
    def has_roles(self) -> bool:
        """Whether the policy is called by its roles only."""
        return any(one.is_role for one in self.declared.values())

    async def start(self) -> None:
        """Start the hosts one after the other, because loading temporarily takes host memory."""
        for host in self.each:
            await host.start()
        for name, external in self.external.items():
            await external.start(self._tokenizer, is_teacher=name == self.teacher)

    async def policy_loaded(self, manifest_path: Path, version: int) -> None:
        """Replace copies that are due. The worker samples with this version of the policy, whose files still exist."""
        for host in self.each:
            if host.is_due(version):
                await host.take(manifest_path)

    def counters(self) -> dict[str, float]:
        """Monotonic counters by model: tokens of its answers, seconds of generation, log-probs computed and their
        seconds, copies made and failed. All but the tokens of answers are those of the engine, which models may share.
        Of external models: requests, their tokens, costs and seconds.
        """
        found: dict[str, float] = {}
        for name, host in self.hosts.items():
            own = host.engine.counters()
            found |= {f"model_{name}_{key}": own.get(key, 0.0) for key in COUNTERS}
            found[f"model_{name}_tokens"] = float(host.tokens[name])
            found[f"model_{name}_failed"] = float(host.num_failed)
        for name, external in self.external.items():
            found |= {f"model_{name}_{key}": value for key, value in external.counters().items()}
        return found

    async def close(self) -> None:
        """End the engines."""
        for host in self.each:
            await host.engine.close()
        for external in self.external.values():
            await external.client.close()


def make_hosts(spec: ProcessSpec, settings: RolloutSettings, model_dir: Path, tokenizer: Any) -> ModelHosts:
    """Create the hosts that `rollout.models` declares; nothing is allocated yet. Raises UserError if a model has
    another tokenizer."""
    return ModelHosts(
        settings.models,
        [
            _host(models, spec, settings, model_dir, tokenizer)
            for models in by_engine(settings.models, settings.engine, spec.model.dtype)
        ],
        teacher=spec.teacher_model,
        external=[ExternalModel(one) for one in settings.models if one.endpoint is not None],
        tokenizer=tokenizer,
    )


def _host(
    models: Sequence[CalledModelSettings], spec: ProcessSpec, settings: RolloutSettings, model_dir: Path, tokenizer: Any
) -> ModelHost:
    one = models[0]
    folder = model_dir if one.path is None else Path(one.path).expanduser()
    if one.path is not None:
        check_tokenizer(one.name, tokenizer, lambda: load_tokenizer(folder, "from_model"))
    from rollout.engine.frozen import FrozenEngine

    engine = settings.engine
    own = {key: getattr(one, key) for key in ("num_slots", "max_context", "device", "dtype")}
    made = FrozenEngine(
        folder,
        engine.model_copy(update={key: value for key, value in own.items() if value is not None}),
        dtype=spec.model.dtype,
        num_threads=spec.num_threads,
        is_refreshed=one.refresh_every is not None,
        adapters={model.name: Path(model.adapter).expanduser() for model in models if model.adapter is not None},
    )
    return ModelHost(models, made, stop_ids(folder, tokenizer))


def check_tokenizer(name: str, policy: Any, load: Callable[[], Any]) -> None:
    """Raise UserError if a token id stands for different text in the policy and the model, because models exchange
    token ids."""
    ours, theirs = policy.get_vocab(), load().get_vocab()
    if ours != theirs:
        differing = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda entry: (entry[1], entry[0]))
        text, number = differing[0]
        raise UserError(
            f"the tokenizer of model {name} differs from the policy's at token {number} ({text!r})",
            where=MODELS_KEY,
            remedy="use a model with the policy's tokenizer",
        )
