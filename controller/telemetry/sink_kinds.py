"""The kinds of metrics sinks, with config key, package and extra of each, and which of them a config enables.

The packages are only imported in the *_sink modules.
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
    """Import name of its package."""

    @property
    def key(self) -> str:
        """Its key in the config."""
        return f"metrics.{self.name}"

    @property
    def remedy(self) -> str:
        """Remedy if the package is missing."""
        off = "false" if self.name == "tensorboard" else "null"
        return f"pip install 'areal-like[{self.name}]', or set {self.key}: {off}"


KINDS = (
    SinkKind("tensorboard", "tensorboard"),
    SinkKind("wandb", "wandb"),
    SinkKind("mlflow", "mlflow"),
    SinkKind("trackio", "trackio"),
    SinkKind("prometheus", "prometheus_client"),
)


def is_installed(package: str) -> bool:
    """Return whether the package can be imported; a plain folder of that name (wandb creates one) does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def sinks_of(settings: SinkSettings) -> list[SinkKind]:
    """The enabled sinks."""
    return [kind for kind in KINDS if getattr(settings, kind.name) not in (None, False)]
