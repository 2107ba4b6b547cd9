"""The metrics sinks there are, and which of them a config asks for.

Owns: key, package and extra of each. Refuses: importing any of the packages, writing to them (the *_sink modules).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from controller.config.run_config import SinkSettings


@dataclass(frozen=True)
class SinkKind:
    """One kind of sink."""

    name: str
    package: str
    """Import name of what it needs."""

    @property
    def key(self) -> str:
        """Its key in the config."""
        return f"metrics.{self.name}"

    @property
    def remedy(self) -> str:
        """What to do where the package is absent."""
        off = "false" if self.name == "tensorboard" else "null"
        return f"pip install 'areal-like[{self.name}]', or {self.key}: {off}"


KINDS = (
    SinkKind("tensorboard", "tensorboard"),
    SinkKind("wandb", "wandb"),
    SinkKind("mlflow", "mlflow"),
    SinkKind("trackio", "trackio"),
    SinkKind("prometheus", "prometheus_client"),
)


def is_installed(package: str) -> bool:
    """The package can be imported; a mere folder of that name (wandb leaves one behind) cannot."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def sinks_of(settings: SinkSettings) -> list[SinkKind]:
    """The sinks that are switched on."""
    return [kind for kind in KINDS if getattr(settings, kind.name) not in (None, False)]
