"""Versions through the trainer's own sockets, in chunks (areal_like/weights/stream.py has the messages)."""

from __future__ import annotations

from areal_like.weights.transfer import TransferDescriptor

STREAM = TransferDescriptor(
    name="stream", sender="trainer.weights.sender:stream_sender", scheme="tcp://", is_store_on_trainer_node=True
)
