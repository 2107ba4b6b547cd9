"""Opens the configured sinks, and reports all user errors at once.

Sinks are in sinks.py and *_sink.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from controller.config.offline_config import OfflineConfig
from controller.config.run_config import RunConfig
from controller.config.validation.run import is_loopback
from controller.run_folder.run_folder import RunFolder
from controller.telemetry.callbacks import open_callbacks
from controller.telemetry.sink_kinds import KINDS
from controller.telemetry.sinks import Sink, Sinks


def open_sinks(config: RunConfig | OfflineConfig, folder: RunFolder, run_id: str, note: Callable[[str], None]) -> Sinks:
    """Open the run's sinks. Raises UserError; `note` receives messages with their addresses."""
    settings, remedies = config.metrics, {kind.name: kind.remedy for kind in KINDS}
    opened: list[Sink] = []
    sinks: Sinks | None = None
    if settings.tensorboard:
        from controller.telemetry.tensorboard_sink import TensorboardSink

        named = settings.tensorboard
        place = folder.root / "tensorboard" if named is True else Path(str(named)).expanduser() / folder.name
        opened.append(TensorboardSink(place, remedy=remedies["tensorboard"]))
    if settings.wandb is not None:
        from controller.telemetry.tracker_sink import WandbSink

        start = {
            **settings.wandb.model_dump(mode="json"), "name": folder.name, "id": run_id, "dir": str(folder.root),
            "config": config.model_dump(mode="json"),
        }  # fmt: skip
        if isinstance(config, RunConfig):
            start |= {"tags": [*settings.wandb.tags, *config.tags], "notes": config.notes}
        opened.append(WandbSink(start, folder.logs / "wandb.log", remedy=remedies["wandb"]))
    common = {"name": folder.name, "id": run_id, "config": config.model_dump(mode="json")}
    if settings.mlflow is not None:
        from controller.telemetry.tracker_sink import MlflowSink

        local = (folder.root / "mlflow").as_uri() if settings.mlflow.uri is None else ""
        said = {"tags": config.tags, "notes": config.notes} if isinstance(config, RunConfig) else {}
        store = settings.mlflow.uri or f"sqlite:///{folder.root / 'mlflow.db'}"
        start = {**common, "tags": [], "notes": "", **said, "uri": store, "artifacts": local}
        start["experiment"] = settings.mlflow.experiment
        opened.append(MlflowSink(start, folder.logs / "mlflow.log", remedy=remedies["mlflow"]))
    if settings.trackio is not None:
        from controller.telemetry.tracker_sink import TrackioSink

        place = Path(settings.trackio.dir or folder.root / "trackio").expanduser().resolve()
        start = {**common, **settings.trackio.model_dump(), "dir": str(place)}
        opened.append(TrackioSink(start, folder.logs / "trackio.log", remedy=remedies["trackio"]))
    if settings.prometheus is not None:
        from controller.telemetry.prometheus_sink import PrometheusSink

        host, port = settings.prometheus.host, settings.prometheus.port
        endpoint = PrometheusSink(
            host, port, run=folder.name, losses=lambda: sinks.counts() if sinks else {}, remedy=remedies["prometheus"]
        )
        opened.append(endpoint)
        whom = "" if is_loopback(host) else "; anyone who can reach this address can read them"
        note(f"metrics for Prometheus at {endpoint.url}{whom}")
    if settings.openlineage is not None:
        from controller.telemetry.openlineage_sink import OpenLineageSink

        opened.append(OpenLineageSink(settings.openlineage, folder.root))
    callbacks = []
    if isinstance(config, RunConfig):
        callbacks = open_callbacks(config.callbacks, timeout_s=config.callback_timeout_s)
    sinks = Sinks(opened, callbacks)
    facts = {"name": folder.name, "folder": str(folder.root), "run_id": run_id}
    sinks.offer({"kind": "start", "time_s": time.time(), **facts, "config": config.model_dump(mode="json")})
    return sinks
