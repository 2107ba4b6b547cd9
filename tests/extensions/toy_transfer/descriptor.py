"""A way to transfer weights of one's own: the trainer serves the files of a version through plain TCP, once per worker.

Everything it needs is in this folder; a configuration names it as `toy_transfer.descriptor:TOY`.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.setting_problem import SettingProblem
from areal_like.weights.transfer import Limit, TransferDescriptor, TransferUse

SCHEME = "toy://"


def _problems(use: TransferUse) -> Iterator[SettingProblem]:
    block = use.settings.options.get("block_bytes", 1)
    if not isinstance(block, int) or block < 1:
        yield SettingProblem(("trainer.weights.options",), "block_bytes is not a positive number", "such as 65536")


TOY = TransferDescriptor(
    name="toy",
    sender="toy_transfer.sender:make_sender",
    receiver="toy_transfer.receiver:make_receiver",
    scheme=SCHEME,
    cannot_send_deltas=Limit("the toy serves whole versions", "delta: null"),
    problems=_problems,
)
