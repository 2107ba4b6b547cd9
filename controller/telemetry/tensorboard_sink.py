"""Writes TensorBoard event files with tensorboard's own records and protocol buffers, without TensorFlow or torch.

Each session of a run writes a separate file in the run's folder; TensorBoard shows them as one run. Every row is
flushed, so that readers see it at once and a crash loses nothing. Queues are in sinks.py, curve names in scalars.py.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from controller.telemetry.answers_table import answers_table, as_markdown
from controller.telemetry.scalars import AXES, scalars
from controller.telemetry.sinks import absent

STRING = 7
"""DT_STRING of TensorFlow's types.proto."""


class TensorboardSink:
    """Writes <folder>/events.out.tfevents.*; rows of kind `pulse` are drawn over seconds since the first lease."""

    name = "tensorboard"
    kinds = frozenset(AXES)

    def __init__(self, folder: Path, *, remedy: str) -> None:
        """Raises UserError: the package is not installed, or the folder cannot be written."""
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
            what = f"{folder} is not writable ({error.strerror})"
            raise UserError(what, where="metrics.tensorboard", remedy="choose a different folder") from error
        self._put(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one row as one event. Raises OSError."""
        if (table := answers_table(record)) is not None:
            self._put_table(table)
        found = scalars(record)
        if found is None or not found.values:
            return
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in found.values.items()]
        self._put(self._event(wall_time=found.time_s, step=int(found.at), summary=self._summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _put_table(self, table: Mapping[str, Any]) -> None:
        """Write a table as text for TensorBoard's text plugin, which renders Markdown."""
        value = self._summary.Value(tag=f"{table['name']}/text_summary")
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = STRING
        value.tensor.tensor_shape.dim.add(size=1)
        value.tensor.string_val.append(as_markdown(table).encode())
        summary = self._summary(value=[value])
        self._put(self._event(wall_time=table["time_s"], step=table["version"], summary=summary))

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
