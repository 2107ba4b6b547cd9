"""Survey of a cluster for `areal-like validate`: expected placement, missing resources, problems of nodes.

Placements are reserved in launcher.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from areal_like.errors import UserError
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.launch.choice import Survey
from controller.launch.cluster.connection import Cluster
from controller.launch.cluster.launcher import too_small
from controller.launch.cluster.node_check import check_nodes
from controller.launch.cluster.pools import pools_of
from controller.launch.cluster.seating import seat, seat_lines


def survey(config: RunConfig) -> Survey:
    """Survey the cluster of `launch.ray.address` and each of its nodes."""
    found, cluster = Survey(), Cluster(config.launch.ray.address)
    try:
        cluster.open(f"areal_like-validate-{os.getpid()}")
    except UserError as error:
        found.absent.append(Problem((error.where,), error.what, error.remedy))
        return found
    try:
        nodes, pools = cluster.nodes(), pools_of(config)
        plan = seat(pools, nodes)
        found.seats = seat_lines(pools, nodes, plan.seats)
        if plan.shortages:
            small = too_small(plan.shortages)
            found.problems.append(Problem((small.where,), small.what, small.remedy))
        try:
            runs_dir = Path(config.runs_dir).expanduser()
            runs_dir.mkdir(parents=True, exist_ok=True)
            found.problems += check_nodes(config, cluster, nodes, runs_dir)
        except OSError:
            pass  # already reported by the check of folders
    finally:
        cluster.close()
    return found
