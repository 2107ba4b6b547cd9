"""Transfer of versions as files of the weight store, which trainer and workers share."""

from __future__ import annotations

from areal_like.weights.transfer import Limit, TransferDescriptor

SHARED_MEMORY = TransferDescriptor(
    name="shm",
    layout="shm",
    cannot_cross_hosts=Limit(
        "workers on other hosts cannot see this host's shared memory",
        "set kind: stream, or kind: disk with a shared_dir",
    ),
)
DISK = TransferDescriptor(name="disk", place="disk", needs_shared_dir=True, own_keys=("shared_dir",))
