"""Cross-checks of the weight transfer, based on its descriptor (areal_like/weights/transfer.py). Pure, except that a
transfer of the user is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.errors import UserError
from areal_like.weights.registry import TRANSFERS
from areal_like.weights.transfer import KIND_KEY, Limit, TransferDescriptor, TransferUse
from controller.config import engines
from controller.config.launchers import launcher_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig


def transfer_kind_problems(config: RunConfig) -> Iterator[Problem]:
    """Problem of an unknown transfer. All other checks of a configuration depend on the transfer."""
    try:
        _ = config.trainer.weights.transfer
    except UserError as error:
        yield Problem((KIND_KEY,), error.what, error.remedy)


def transfer_problems(config: RunConfig) -> Iterator[Problem]:
    """Settings of the run that the transfer of trainer.weights cannot be combined with."""
    weights, transfer = config.trainer.weights, config.trainer.weights.transfer
    is_across_hosts = not launcher_of(config).is_one_machine
    if weights.options and weights.kind in TRANSFERS:
        yield Problem(
            ("trainer.weights.options", KIND_KEY), f"the transfer {weights.kind} has no options", "remove the options"
        )
    if is_across_hosts and transfer.needs_shared_dir and weights.shared_dir is None:
        yield Problem(
            ("trainer.weights.shared_dir", "launch.kind"),
            "workers on other hosts can read weights only from a folder that all hosts share",
            "specify a folder that all hosts share, or set trainer.weights.kind: stream",
        )
    yield from _keys_of_others(config, transfer)
    if weights.shared_dir == "" and "shared_dir" in transfer.own_keys:
        yield Problem(("trainer.weights.shared_dir",), "the path of the folder is empty", "specify a folder, or null")
    for keys, is_asked, limit in _limits(config, transfer, is_across_hosts):
        if is_asked and limit is not None:
            yield Problem(keys, limit.reason, limit.remedy)
    devices = frozenset((*config.rollout_devices, *config.trainer_devices))
    yield from engines.as_problems(transfer.problems(TransferUse(weights, devices, is_across_hosts)))
    if transfer.needs_process_group:
        yield from engines.group_problems(config, config.model.init)


def _limits(
    config: RunConfig, transfer: TransferDescriptor, is_across_hosts: bool
) -> tuple[tuple[tuple[str, str], bool, Limit | None], ...]:
    """Keys, whether the configuration requires the feature, and why the transfer does not support it."""
    weights = config.trainer.weights
    is_draining, is_rolling = config.rollout.interruption == "drain", weights.swap == "rolling"
    return (
        ((KIND_KEY, "launch.kind"), is_across_hosts, transfer.cannot_cross_hosts),
        (("trainer.weights.delta", KIND_KEY), weights.delta is not None, transfer.cannot_send_deltas),
        (("trainer.weights.swap", KIND_KEY), is_rolling, transfer.cannot_swap_rolling),
        (("rollout.interruption", KIND_KEY), is_draining, transfer.cannot_drain),
        ((KIND_KEY, "placement"), config.is_colocated, transfer.cannot_share_devices),
    )


def _keys_of_others(config: RunConfig, transfer: TransferDescriptor) -> Iterator[Problem]:
    """Keys that are set although only another transfer reads them."""
    weights = config.trainer.weights
    for other in TRANSFERS.values():
        for key in other.own_keys:
            is_set = getattr(weights, key) != type(weights).model_fields[key].default  # a resolved config names all
            if is_set and key not in transfer.own_keys:
                yield Problem(
                    (f"trainer.weights.{key}", KIND_KEY),
                    f"this key has no effect with kind {weights.kind}",
                    f"remove this key, or set kind: {other.name}",
                )
