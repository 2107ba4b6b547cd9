"""What does not go together with the way weights are transferred. Pure but for importing a transfer of the user's.

Owns: asking the transfer's descriptor (areal_like/weights/transfer.py) for what the configuration combines it with.
Refuses: knowing any transfer; the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.errors import UserError
from areal_like.weights.registry import TRANSFERS
from areal_like.weights.transfer import Limit, TransferDescriptor, TransferUse
from controller.config.problems import Problem
from controller.config.run_config import RunConfig

KIND = "trainer.weights.kind"
STREAM = "kind: stream"


def transfer_of(config: RunConfig) -> TransferDescriptor | None:
    """The transfer that the configuration names; None where there is none, which `transfer_problems` reports."""
    try:
        return config.trainer.weights.transfer
    except UserError:
        return None


def transfer_problems(config: RunConfig) -> Iterator[Problem]:
    """Of trainer.weights: its transfer, and what that does not combine with."""
    weights = config.trainer.weights
    try:
        transfer = weights.transfer
    except UserError as error:
        yield Problem((KIND,), error.what, error.remedy)
        return
    if weights.options and weights.kind in TRANSFERS:
        yield Problem(("trainer.weights.options", KIND), f"{weights.kind} has no options", "remove them")
    is_across_hosts = config.launch.kind != "local"
    if is_across_hosts and transfer.needs_shared_dir and weights.shared_dir is None:
        yield Problem(
            ("trainer.weights.shared_dir", "launch.kind"),
            "workers on other hosts need a folder that they can access",
            "name one, or trainer.weights.kind: stream",
        )
    if weights.shared_dir == "":
        yield Problem(("trainer.weights.shared_dir",), "is empty", "a folder, or null")
    else:
        yield from _keys_of_others(config, transfer)
    for keys, is_asked, limit in _limits(config, transfer, is_across_hosts):
        if is_asked and limit is not None:
            yield Problem(keys, limit.reason, limit.remedy)
    devices = frozenset((*config.rollout_devices, *config.trainer_devices))
    for found in transfer.problems(TransferUse(weights, devices, is_across_hosts)):
        yield Problem(*found)
    if transfer.needs_process_group and config.rollout.engine.kind == "sglang":
        yield from _servers(config, KIND)


def _limits(
    config: RunConfig, transfer: TransferDescriptor, is_across_hosts: bool
) -> tuple[tuple[tuple[str, str], bool, Limit | None], ...]:
    """Keys, whether the configuration asks for it, and why the transfer cannot."""
    weights = config.trainer.weights
    is_draining, is_rolling = config.rollout.interruption == "drain", weights.swap == "rolling"
    return (
        ((KIND, "launch.kind"), is_across_hosts, transfer.cannot_cross_hosts),
        (("trainer.weights.delta", KIND), weights.delta is not None, transfer.cannot_send_deltas),
        (("trainer.weights.swap", KIND), is_rolling, transfer.cannot_swap_rolling),
        (("rollout.interruption", KIND), is_draining, transfer.cannot_drain),
        ((KIND, "placement"), config.is_colocated, transfer.cannot_share_devices),
    )


def _keys_of_others(config: RunConfig, transfer: TransferDescriptor) -> Iterator[Problem]:
    """Keys that are set although only another transfer reads them."""
    weights = config.trainer.weights
    for other in TRANSFERS:
        for key in other.own_keys:
            is_set = getattr(weights, key) != type(weights).model_fields[key].default  # a resolved config names all
            if is_set and key not in transfer.own_keys:
                yield Problem(
                    (f"trainer.weights.{key}", KIND),
                    f"has no effect with kind {weights.kind}",
                    f"remove it, or kind: {other.name}",
                )


def _servers(config: RunConfig, kind: str) -> Iterator[Problem]:
    """SGLang's servers take part where it can be proved what they hold afterwards, and where they can be replaced."""
    engine = config.rollout.engine
    if engine.device != "cpu":
        yield Problem(
            (kind, "rollout.engine.device"),
            "the weights of an SGLang server on a GPU cannot be verified after a transfer",
            STREAM,
        )
    elif engine.sglang.tp_size > 1:
        yield Problem((kind, "rollout.engine.sglang.tp_size"), "only servers of one rank take part", STREAM)
    if engine.sglang.attach:
        yield Problem(
            (kind, "rollout.engine.sglang.attach"),
            "a server that fails in a process group hangs, and only one that was launched here can be replaced",
            STREAM,
        )
