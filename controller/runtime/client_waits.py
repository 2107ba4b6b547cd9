"""Rollout workers whose samples wait for clients outside the run (workflow `traffic`).

Such a wait has no deadline, and is no stall: nobody in the run can end it.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal_like.wire.messages import WAITS_FOR_TRAFFIC


def client_waits(states: Mapping[str, str], addresses: Mapping[str, str]) -> list[str]:
    """These waits as sentences. `states`: of processes, by name. `addresses`: of clients, by worker."""
    return [
        f"{name} waits for clients at {address}"
        for name, address in addresses.items()
        if states.get(name) == WAITS_FOR_TRAFFIC
    ]
