"""One rank of runs from files, as a process: `python offline_rank_job.py JOB RANK`.

JOB is a JSON file: a list of scenes, each an OfflineSpec, and the step after which it is stopped. All meet once.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rank_job import RIGHT_CLOSE, share_one_group

from areal_like.process import die_with_parent
from trainer.offline.loop import OfflineTraining
from trainer.offline.spec import OfflineSpec
from trainer.ranks import leave_at_once

HANG_S = 500.0
"""By then it is over, or its log says where every thread stands."""


def run(spec: OfflineSpec, until: int | None) -> None:
    training = OfflineTraining(spec, lambda: until is not None and training.version >= until)
    training.run()


def main(job: Path, rank: int) -> None:
    faulthandler.dump_traceback_later(HANG_S)
    torch.set_num_threads(1)
    met = share_one_group()
    die_with_parent(os.getppid())
    for scene in json.loads(job.read_text()):
        spec = OfflineSpec.model_validate(scene["spec"]).model_copy(update={"rank": rank})
        print("scene", spec.run_dir, flush=True)
        run(spec, scene["until"] if rank == 0 else None)  # rank 0 alone decides
    RIGHT_CLOSE(met[0])


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException as error:
        leave_at_once(error)
