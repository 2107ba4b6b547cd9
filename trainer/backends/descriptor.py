"""Descriptions of trainer backends, their requirements and memory use, for code that does not import the backends.

It contains `BackendDescriptor`, the base class of every backend's description, and its value types. Imports no torch;
the backends' own interface is in port.py. The controller uses a descriptor to check a configuration, and a rank to
create the backend. No other package compares `trainer.backend` with a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal_like.setting_problem import SettingProblem
from trainer.config import TrainerSettings

KIND_KEY = "trainer.backend"
OPTIONS_KEY = "trainer.backend_options"
SEQUENCE_KEY = "trainer.sequence_parallel"
TENSOR_KEY = "trainer.tensor_parallel"
REPLICAS_KEY = "trainer.fsdp.replicas"
FLOAT32 = 4
"""Bytes per number."""


class RequiredPackage(NamedTuple):
    """A top-level module that must be importable, and how to install it or do without."""

    module: str
    remedy: str


class StateDemand(NamedTuple):
    """The state that all ranks together hold between two steps.

    num_bytes: weights, gradients and AdamW's moments. largest_device_bytes: memory of the largest available device.
    outer_share: the part of it that tensor parallelism does not split.
    """

    num_bytes: float
    largest_device_bytes: float
    outer_share: float = 0.0


class Share(NamedTuple):
    """One rank's share of a part of the state. part: 1.0: all of it. on_host: in host memory, not on its device."""

    part: float
    on_host: bool = False


@dataclass(frozen=True)
class StateLayout:
    """One rank's share of each part of the state. words: description of the layout; empty: evenly over ranks."""

    weights: Share
    gradients: Share
    moments: Share
    words: str = ""

    @classmethod
    def even(cls, ranks: int, *, on_host: bool = False) -> StateLayout:
        """Return the layout in which every rank has an equal part of everything."""
        share = Share(1 / ranks, on_host)
        return cls(share, share, share)


class PassDemand(NamedTuple):
    """The sizes that determine the memory of a pass, in parameters of the full model.

    matrices: weight matrices of all layers; layer: one layer; outer: embedding, head and final norm; head: its weight,
    which may be the embedding's. compute_bytes: of the dtype the pass computes in.
    """

    parameters: float
    matrices: float
    layer: float
    outer: float
    head: float
    compute_bytes: int


class BackendDescriptor:
    """Describes one backend for everything except training. Subclass it, override what differs, and register an
    instance (registry.py) or name it in `trainer.backend` by import path. Its module imports no torch.

    Example:
        >>> class Mine(BackendDescriptor):
        ...     name = "mine"
        ...     factory = "my_backend.backend:make"
        >>> Mine().state(TrainerSettings(ranks=4), StateDemand(16e9, 300e9)).weights
        Share(part=0.25, on_host=False)
    """

    name: str
    """Value of `trainer.backend`, if it is registered; recorded in trainer.json."""
    factory: str = ""
    """`module:function`, imported by the ranks only and called with a model and a trainer.backends.port.Setup; returns
    the Backend. Empty: another backend is used, which is chosen when the model is known."""
    fixed_factory: str = ""
    """`module:function`, called with a model on the meta device and a Setup with its source: returns a policy that is
    not trained, distributed over the ranks (FixedPolicy in port.py). Empty: it is in full on every rank."""
    section: str = ""
    """Its section of `trainer`; empty: it is configured by `trainer.backend_options`, or not at all."""
    max_ranks: int | None = None
    """Largest number of processes; None: no limit."""
    needs_process_group: bool = True
    """Ranks join a process group before it is created, even a single rank."""
    packages: tuple[RequiredPackage, ...] = ()
    """Packages that must be installed where the ranks run."""
    adapts_to_memory: bool = False
    """It moves state that does not fit a device to host memory by itself."""
    trains_critics: bool = False
    """Created with `Setup.is_critic`, it returns values instead of log-probs (port.py)."""
    trains_adapters: bool = False
    """It trains the parameters that require a gradient, keeps the others unchanged, and can return the full weights of
    selected names only (`trainer.lora`)."""
    gives_gradients: bool = False
    """It implements `Backend.own_gradients`."""
    splits_sequences: bool = False
    """Its ranks may share a micro-batch (`trainer.sequence_parallel`): it computes with policy_logprobs, and adds the
    gradients of all ranks."""
    splits_matrices: bool = False
    """Its ranks may split the matrices of a layer (`trainer.tensor_parallel`)."""
    replicates_shards: bool = False
    """Its ranks may form groups with a sharded copy of the model each (`trainer.fsdp.replicas`)."""
    gathers_in_compute_type: bool = False
    """With `precision: bfloat16` parameters are gathered in bfloat16, so hidden states between layers have that dtype;
    otherwise they are float32."""
    when_colocated: str = ""
    """Settings with which it releases devices between steps, for messages; empty: it cannot."""

    when_recalling: str = ""
    """Settings with which it recalls versions, for messages; empty: it cannot."""

    def recalls_versions(self, settings: TrainerSettings) -> bool:
        """True if it can compute with the weights of an earlier version (`trainer.version_logprobs`), which requires
        `Backend.own_weights`."""
        return False

    def releases_devices(self, settings: TrainerSettings) -> bool:
        """True if nothing of it has to stay on the devices between two steps: `Backend.move` moves all of it."""
        return False

    def offloaded(self, settings: TrainerSettings) -> TrainerSettings | None:
        """Return the settings with which it keeps all its state in host memory; None if it cannot."""
        return None

    def state(self, settings: TrainerSettings, demand: StateDemand) -> StateLayout:
        """Return the layout of one rank's state."""
        return StateLayout.even(settings.ranks)

    def reads_parts(self, settings: TrainerSettings) -> bool:
        """True if it takes a model on the meta device with `Setup.source`, from which each rank reads its own part; it
        is a PartsBackend (port.py)."""
        return False

    def fixed(self, settings: TrainerSettings) -> Share:
        """Return one rank's share of a policy that is not trained. By default all of it."""
        return Share(1.0)

    def working_bytes(self, settings: TrainerSettings, demand: PassDemand) -> float:
        """Return the bytes on a rank's device when the backward pass begins, apart from the state and activations:
        parameters that are gathered or cast, and the head's gradient if it is not sharded yet. An estimate. By default
        the cast copy of every matrix that autocast keeps for a pass.
        """
        return 0.0 if demand.compute_bytes == FLOAT32 else demand.compute_bytes * demand.matrices

    def reducing_bytes(self, settings: TrainerSettings, demand: PassDemand) -> float:
        """Return the bytes that are added when the gradients of a layer are complete and those of the layer before it
        are being summed over ranks. By then the activations of both are released. Default: none."""
        return 0.0

    def publishing_bytes(self, settings: TrainerSettings, parameters: float) -> float:
        """Return the bytes on rank 0's device while the full weights are gathered between two steps: only for a version
        with an adapter merged in; others are published in pieces. Default: none."""
        return 0.0

    def option_problems(self, options: Mapping[str, Any]) -> Iterator[SettingProblem]:
        """Yield errors in `trainer.backend_options`. By default any option is an error."""
        if options:
            what = f"{self.name} has no options, but these are set: {', '.join(options)}"
            yield SettingProblem(
                (OPTIONS_KEY, KIND_KEY),
                what,
                f"use the settings in trainer.{self.section} instead" if self.section else "remove these options",
            )

    def setting_problems(self, settings: TrainerSettings) -> Iterator[SettingProblem]:
        """Yield contradictions in its section; called for every backend, whichever is used. Pure."""
        yield from ()
