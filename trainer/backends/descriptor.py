"""What the rest of the program asks of a trainer backend without importing it: its needs, where it keeps its state.

Owns: `BackendDescriptor`, the base class of every backend's description, and what it answers with. Refuses: torch, and
everything a backend does (port.py). The controller asks a descriptor when it judges a configuration, a rank when it
makes the backend. No other package compares `trainer.backend` with a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal_like.setting_problem import SettingProblem
from trainer.config import TrainerSettings

KIND_KEY = "trainer.backend"
OPTIONS_KEY = "trainer.backend_options"
FLOAT32 = 4
"""Bytes of a number."""


class RequiredPackage(NamedTuple):
    """A top-level module that must be importable, and how to get it or do without."""

    module: str
    remedy: str


class StateDemand(NamedTuple):
    """What all ranks together have to hold between two steps.

    num_bytes: weights, gradients and AdamW's moments. largest_device_bytes: no device that is sold has more memory.
    """

    num_bytes: float
    largest_device_bytes: float


class Share(NamedTuple):
    """What one rank holds of a term of the state. part: 1.0: all of it. on_host: in host memory, not on its device."""

    part: float
    on_host: bool = False


@dataclass(frozen=True)
class StateLayout:
    """Where one rank keeps the state, term by term. words: how it is spread, for people; empty: evenly over ranks."""

    weights: Share
    gradients: Share
    moments: Share
    words: str = ""

    @classmethod
    def even(cls, ranks: int, *, on_host: bool = False) -> StateLayout:
        """Every rank has an equal part of everything."""
        share = Share(1 / ranks, on_host)
        return cls(share, share, share)


class PassDemand(NamedTuple):
    """What a pass computes with, in parameters of the whole model.

    matrices: weight matrices of all layers; layer: one layer; outer: embedding, head and final norm. compute_bytes: of
    the type the pass computes in.
    """

    parameters: float
    matrices: float
    layer: float
    outer: float
    compute_bytes: int


class BackendDescriptor:
    """One backend, for everything but training. Subclass it, override what differs, and register an instance
    (registry.py) or name it in `trainer.backend` by import path. Its module imports no torch.

    Example:
        >>> class Mine(BackendDescriptor):
        ...     name = "mine"
        ...     factory = "my_backend.backend:make"
        >>> Mine().state(TrainerSettings(ranks=4), StateDemand(16e9, 300e9)).weights
        Share(part=0.25, on_host=False)
    """

    name: str
    """Value of `trainer.backend`, where it is registered; recorded in trainer.json."""
    factory: str = ""
    """`module:function`, imported by the ranks only and called with a model and a trainer.backends.port.Setup; returns
    the Backend. Empty: it stands for another backend, chosen when the model is known."""
    section: str = ""
    """Its section of `trainer`; empty: it is configured by `trainer.backend_options`, or not at all."""
    max_ranks: int | None = None
    """Processes it can train with; None: any number."""
    needs_process_group: bool = True
    """Ranks meet in a process group before it is made, even a single one."""
    packages: tuple[RequiredPackage, ...] = ()
    """Must be installed where the ranks run."""
    adapts_to_memory: bool = False
    """It moves to host memory by itself what a device cannot hold."""
    trains_critics: bool = False
    """Made with `Setup.is_critic`, it gives values instead of log-probs (port.py)."""
    trains_adapters: bool = False
    """It trains the parameters that require a gradient, keeps the others as they are, and gives the full weights of
    some names alone (`trainer.lora`)."""
    gives_gradients: bool = False
    """It has `Backend.own_gradients`."""
    gathers_in_compute_type: bool = False
    """With `precision: bfloat16` parameters are gathered in bfloat16, so hidden states between layers have that type;
    else they are float32."""
    when_colocated: str = ""
    """How it is configured to release devices between steps, as advice; empty: it cannot."""

    when_recalling: str = ""
    """How it is configured to recall versions, as advice; empty: it cannot."""

    def recalls_versions(self, settings: TrainerSettings) -> bool:
        """It can compute with the weights of an earlier version (`trainer.version_logprobs`): it has
        `Backend.own_weights`."""
        return False

    def releases_devices(self, settings: TrainerSettings) -> bool:
        """Between two steps nothing of it has to stay on the devices: `Backend.move` takes all of it away."""
        return False

    def offloaded(self, settings: TrainerSettings) -> TrainerSettings | None:
        """The settings with which it keeps all its state in host memory; None where it cannot."""
        return None

    def state(self, settings: TrainerSettings, demand: StateDemand) -> StateLayout:
        """Where a rank keeps the state."""
        return StateLayout.even(settings.ranks)

    def working_bytes(self, settings: TrainerSettings, demand: PassDemand) -> float:
        """Bytes on a rank's device during a pass, apart from the state and from activations: parameters that are
        gathered or cast, gradients that are not sharded yet. An estimate. Here: the cast copy of every matrix that
        autocast keeps for a pass.
        """
        return 0.0 if demand.compute_bytes == FLOAT32 else demand.compute_bytes * demand.matrices

    def publishing_bytes(self, settings: TrainerSettings, parameters: float) -> float:
        """Bytes on the device of rank 0 while the full weights are collected, between two steps. Here: none."""
        return 0.0

    def option_problems(self, options: Mapping[str, Any]) -> Iterator[SettingProblem]:
        """What is wrong with `trainer.backend_options`. Here: that there are any."""
        if options:
            what = f"{self.name} has no options (here: {', '.join(options)})"
            yield SettingProblem((OPTIONS_KEY, KIND_KEY), what, f"trainer.{self.section}" if self.section else "{}")

    def setting_problems(self, settings: TrainerSettings) -> Iterator[SettingProblem]:
        """Contradictions in its section, asked for whichever backend is used. Pure."""
        yield from ()
