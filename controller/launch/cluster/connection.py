"""Connection to an existing Ray cluster: its nodes, free resources, and tasks on nodes.

The only import of ray in the controller besides seat_process.py and launcher.py. Converts Ray's errors to sentences. A
cluster is never started here: `ray start` does that, and an automatically started one would only have one machine.
Methods block: call them from a thread.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.errors import OperationError, UserError, first_line
from areal_like.transport.sockets import own_host
from controller.launch.cluster import node_look
from controller.launch.cluster.job_guard import JOB_VARIABLE
from controller.launch.cluster.seating import Node

log = logging.getLogger(__name__)

KNOCK_S = 10.0
"""Time limit of the connection."""
OWN_RESOURCES = ("node:", "memory", "object_store_memory", "bundle_", "accelerator_type:")
"""Resource names that Ray itself assigns to nodes."""


class Cluster:
    """One connection; a process has one at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_open = False

    def open(self, namespace: str) -> None:
        """Connect. Raises UserError if there is no cluster, or it rejects the connection."""
        ray = import_ray()
        logging.getLogger("ray").setLevel(logging.ERROR)  # Ray warns about a setting that is used on purpose
        if self._address.startswith("ray://"):
            raise UserError(
                "Ray Client addresses (ray://...) are not supported",
                where="launch.ray.address",
                remedy="start the run on a node of the cluster, or use `ray job submit`",
            )
        _knock(self._address)
        try:
            ray.init(
                address=self._address,
                namespace=namespace,
                runtime_env=_runtime_env(),
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise _refusal(error, self._address) from error
        self._is_open = True

    def close(self) -> None:
        """Disconnect; placement groups and actors that were not released are removed."""
        if self._is_open:
            self._is_open = False
            import_ray().shutdown()

    @property
    def own_address(self) -> str:
        """Address of this node; if it is not an address of this host, the local address of the route to the cluster's
        head.
        """
        ray = import_ray()
        address = str(ray.util.get_node_ip_address())
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family) as probe:
                probe.bind((address, 0))
        except OSError:
            return own_host(f"tcp://{ray.get_runtime_context().gcs_address}").strip("[]")
        return address

    def nodes(self) -> list[Node]:
        """Live nodes, this node first, with their free resources."""
        ray = import_ray()
        own = ray.get_runtime_context().get_node_id()
        free = _free_by_node()
        found = [
            Node(
                node_id=row["NodeID"],
                address=row["NodeManagerAddress"],
                free=_named(free.get(row["NodeID"], row["Resources"])),
                is_controllers=row["NodeID"] == own,
            )
            for row in ray.nodes()
            if row["Alive"]
        ]
        return sorted(found, key=lambda node: (not node.is_controllers, node.address, node.node_id))

    def is_alive(self, node_id: str) -> bool:
        """Return whether Ray reports the node as alive."""
        return any(row["NodeID"] == node_id and row["Alive"] for row in import_ray().nodes())

    def look_at(
        self, nodes: Sequence[Node], orders: Mapping[str, dict[str, Any]], deadline_s: float
    ) -> dict[str, dict[str, Any] | Exception]:
        """Run node_look.look on all nodes in parallel; return its result, or the error, by node id."""
        refs = {node.node_id: self._on(node.node_id, node_look.look).remote(orders[node.node_id]) for node in nodes}
        return _answers(refs, deadline_s)

    def free_port(self, node: Node, deadline_s: float = 30.0) -> int:
        """Find a free port on that node. Raises OperationError."""
        ref = self._on(node.node_id, node_look.free_port).remote(node.address)
        answer = _answers({node.node_id: ref}, deadline_s)[node.node_id]
        if isinstance(answer, Exception):
            raise OperationError(f"cannot get a free port on node {node.address}: {first_line(answer)}") from answer
        return int(answer)

    @staticmethod
    def _on(node_id: str, function: Any) -> Any:
        ray = import_ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=strategy)


def import_ray() -> Any:
    """Import ray. Raises UserError if the extra is not installed."""
    try:
        import ray
        import ray.util.scheduling_strategies  # Ray does not by itself
    except ImportError as error:
        raise UserError(
            "the `ray` package is not installed",
            where="launch.kind: ray",
            remedy="pip install 'areal-like[ray]', or set launch.kind: local",
        ) from error
    ray.cloudpickle.register_pickle_by_value(node_look)
    return ray


def _runtime_env() -> dict[str, Any]:
    """Runtime environment with this program's packages for Ray's workers. The working directory of a submitted job has
    priority.
    """
    if JOB_VARIABLE in os.environ:
        return {}
    import areal_like

    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    ours = str(Path(areal_like.__file__).resolve().parent.parent)
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys([ours, *inherited]))}}


def _knock(address: str) -> None:
    """Check that the address accepts connections. Raises UserError otherwise; Ray itself would retry for many
    minutes.
    """
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, colon, port = named.rpartition(":")
    if not colon or not port.isdigit():
        return  # Ray finds the address itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
    except OSError as error:
        raise _refusal(error, named) from error


def _refusal(error: Exception, address: str) -> UserError:
    words, said = first_line(error), str(error)
    if "token" in said.lower() or "authentic" in said.lower():
        return UserError(
            f"the Ray cluster rejects the connection ({words})",
            where="launch.ray.address",
            remedy="set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=<the cluster's token file> on this machine, as on "
            "all nodes",
        )
    return UserError(
        f"no Ray cluster is reachable at `{address}` ({words})",
        where="launch.ray.address",
        remedy="run `ray start --head` on this machine, or set launch.ray.address=HOST:6379; if the cluster uses token "
        "authentication, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH as on its nodes",
    )


def _free_by_node() -> dict[str, dict[str, float]]:
    """Free resources by node id; Ray only provides them through an internal module."""
    from ray._private.state import available_resources_per_node

    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


def _named(resources: Mapping[str, float]) -> dict[str, float]:
    return {
        name: float(amount)
        for name, amount in resources.items()
        if not name.startswith(OWN_RESOURCES) and "_group_" not in name
    }


def _answers(refs: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
    ray = import_ray()
    found: dict[str, Any] = {}
    due_s = time.monotonic() + deadline_s
    for key, ref in refs.items():
        try:
            found[key] = ray.get(ref, timeout=max(0.1, due_s - time.monotonic()))
        except ray.exceptions.RayError as error:
            found[key] = error
    return found
