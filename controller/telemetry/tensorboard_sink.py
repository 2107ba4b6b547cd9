"""Writes TensorBoard event files with tensorboard's own records and protocol buffers; requires neither TensorFlow nor
torch.

Threads and counting are in sinks.py, names of curves in scalars.py.

Each session of a run creates its own file in the run's folder; TensorBoard shows them as one run. Every row is flushed,
so that it is available to readers and after a crash.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from controller.telemetry.scalars import AXES, scalars
from controller.telemetry.sinks import absent


class TensorboardSink:
    """Writes <folder>/events.out.tfevents.*; pulses are drawn over whole seconds since the first lease."""

    name = "tensorboard"
    kinds = frozenset(AXES)

    def __init__(self, folder: Path, *, remedy: str) -> None:
        """Raises UserError if the package is missing, or the folder cannot be written."""
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise absent(self.name, remedy) from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        path = folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(path.open("ab"))
        except OSError as error:
            what = f"{folder} cannot be written ({error.strerror})"
            raise UserError(what, where="metrics.tensorboard", remedy="name another folder") from error
        self._put(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one row as one event. Raises OSError."""
        found = scalars(record)
        if found is None or not found.values:
            return
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in found.values.items()]
        self._put(self._event(wall_time=found.time_s, step=int(found.at), summary=self._summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
