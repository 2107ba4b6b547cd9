"""Transfer of versions through sockets, in chunks. The messages are in areal_like/weights/stream.py."""

from __future__ import annotations

from areal_like.weights.transfer import TransferDescriptor

STREAM = TransferDescriptor(
    name="stream", sender="trainer.weights.sender:stream_sender", scheme="tcp://", is_store_on_trainer_node=True
)
