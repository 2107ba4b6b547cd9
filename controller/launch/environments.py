"""Environment of the processes that the controller starts on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from areal_like.import_check import USER_PATH


def child_environment(num_threads: int, *, user_path: Path) -> dict[str, str]:
    """Environment of a child: this installation first on its path, the user's folder last, and its number of
    threads.
    """
    import areal_like

    installation = Path(areal_like.__file__).resolve().parent.parent
    environment = dict(os.environ)
    inherited = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(installation), *inherited]))
    environment[USER_PATH] = str(user_path)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"
    for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        environment[key] = str(num_threads)
    # Threads that wait for another thread must not spin for long: with one other busy process on two cores a step took
    # 25 times as long with the default, and no longer than usual with this setting.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    return environment
