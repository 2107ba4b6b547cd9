"""Errors of torch.distributed about another rank that is gone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from areal_like.errors import OperationError

_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|gloo|nccl|socket|recv|remote process", re.IGNORECASE
)
"""These errors have no type of their own."""


class RankLost(OperationError):
    """Another rank of the trainer exited or hangs, so this one cannot continue. The log of that rank has the reason."""


@contextlib.contextmanager
def peer_errors_as_rank_lost(what: str) -> Iterator[None]:
    """Convert errors of torch.distributed about a peer to RankLost; all others propagate."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not _LOST.search(str(error)):
            raise
        text = " ".join(str(error).split())[:300]
        raise RankLost(f"the other ranks of the trainer were lost while {what} ({text})") from error
