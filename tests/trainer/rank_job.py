"""One rank of a made-up trainer, as a process: `python rank_job.py JOB RANK`.

JOB is a JSON file: a list of scenes, each a ProcessSpec of rank 0 with what is to happen. Rank 0 trains on batches
next to it, as the trainer worker would; the others follow. Rank 0 writes what came out into the scene's folder.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from areal_like.config import ProcessSpec
from areal_like.errors import OperationError
from areal_like.process import die_with_parent
from areal_like.wire.encoding import decode
from areal_like.wire.messages import Batch
from trainer import policy_start, rank_parts
from trainer.activity import Activity
from trainer.data import batch as batch_module
from trainer.follower import Follower
from trainer.model.outline import SlicedSource
from trainer.part_channel import PartChannel
from trainer.rank_parts import PartFile, PartMessages, PartReport
from trainer.ranks import Ranks, leave_at_once
from trainer.training import Training

HANG_S = 150.0
"""By then it is over, or its log says where every thread stands."""
RIGHT_JOIN, RIGHT_CLOSE = Ranks.join, Ranks.close
RIGHT_MINI_BATCH = batch_module._mini_batch
RIGHT_SOURCE = policy_start.sliced_source
RIGHT_READ, RIGHT_RECEIVE, RIGHT_SERVE = SlicedSource.read, PartChannel.receive, PartChannel.serve
RIGHT_ADVANCE, RIGHT_GATHER, RIGHT_PUT = PartFile.advance, PartMessages.gather, rank_parts.put_bytes


def read_batch(folder: Path, step: int) -> Batch:
    with np.load(folder / f"batch-{step}.npz") as file:
        frames = [file[f"frame-{index}"].tobytes() for index in range(len(file.files))]
    batch = decode(frames, frozenset({Batch}))
    assert isinstance(batch, Batch)
    return batch


def mean_of_each_rank(num_ranks: int) -> Any:
    """The classic mistake: every rank divides by its own tokens, and the ranks' gradients are averaged."""

    def mini_batch(*arguments: Any, **options: Any) -> Any:
        micro_batches = RIGHT_MINI_BATCH(*arguments, **options)
        own = sum(one.packed.num_predictions for one in micro_batches if not one.is_dummy)
        return tuple(
            one
            if one.is_dummy
            else replace(
                one,
                inputs=replace(
                    one.inputs, coefficient_N=torch.full_like(one.inputs.coefficient_N, 1 / (own * num_ranks))
                ),
            )
            for one in micro_batches
        )

    return mini_batch


class Phase:
    """What this process does now, and in which phase it is to be killed."""

    now = ""
    doomed = ""
    num_served = 0
    files: ClassVar[list[PartFile]] = []
    """Of checkpoints, by this rank."""

    @classmethod
    def strike(cls, phase: str) -> None:
        if phase == cls.doomed:
            print("killed in", phase, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def may_die(phase: str) -> None:
    """Kill this process in a phase: while it reads the model, or while parts go from rank to rank."""
    Phase.doomed, Phase.now, Phase.num_served, Phase.files = phase, "load", 0, []

    def read(source: SlicedSource, name: str, first: int, out: torch.Tensor, width: int = 0) -> None:
        if name.endswith("norm.weight"):
            Phase.strike("load")
        RIGHT_READ(source, name, first, out, width)

    def receive(channel: PartChannel, rank: int, out_U: torch.Tensor) -> None:
        Phase.strike(Phase.now)
        RIGHT_RECEIVE(channel, rank, out_U)

    def serve(channel: PartChannel, copied: Any) -> None:
        Phase.num_served += 1
        Phase.strike({1: "publish", 2: "export"}.get(Phase.num_served, ""))
        RIGHT_SERVE(channel, copied)

    def advance(file: PartFile, until_s: float) -> bool:
        if file not in Phase.files:
            Phase.files.append(file)
        if len(Phase.files) == 2:  # the one of save_at came first
            assert not RIGHT_ADVANCE(file, 0.0), "there is more to write"
            Phase.strike("save")
        return RIGHT_ADVANCE(file, until_s)

    def gather(messages: PartMessages, own: PartReport) -> list[PartReport]:
        is_last = len(Phase.files) == 2
        if is_last:
            Phase.strike("report")
        reports = RIGHT_GATHER(messages, own)
        if is_last:
            Phase.strike("seal")
        return reports

    SlicedSource.read, PartChannel.receive, PartChannel.serve = read, receive, serve  # type: ignore[method-assign]
    PartFile.advance, PartMessages.gather = advance, gather  # type: ignore[method-assign]


def save(training: Training) -> None:
    training.save()()


def fill_disk() -> None:
    """The disk of this rank is full after the first bytes of tensors, once."""
    written: list[int] = []

    def put(*arguments: Any) -> int:
        written.append(RIGHT_PUT(*arguments))
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written[-1]

    rank_parts.put_bytes = put


def save_on_full_disk(training: Training) -> None:
    try:
        save(training)
    except OperationError as error:
        print("refused:", error, flush=True)


def publish_again(training: Training) -> None:
    """The files of the version are lost, and are written again from the parts of all ranks."""
    written = training.publish()()
    payload = next(written.path.parent.glob("v*.safetensors"))
    payload.unlink()
    assert training.publish_again(training.version - 1) is None
    assert training.publish_again(training.version) is not None
    assert payload.is_file()


def lead(training: Training, scene: dict[str, Any], batches: Path) -> None:
    training.open()
    out, metrics = Path(training.spec.run_dir), []
    while training.version < scene["until"]:
        step = training.version + 1
        batch = read_batch(batches, (step - 1) % scene["num_batches"] + 1)
        prepared = training.prepare(batch.samples, step)
        if scene.get("bad_step") == step:
            prepared.mini_batches[0][-1].inputs.advantage_N[0] = float("nan")  # on this rank alone; it has a gradient
        metrics.append(training.run(prepared))
        print("step", step, flush=True)
        if step == scene.get("full_at"):
            if not scene.get("full_on"):
                fill_disk()
            save_on_full_disk(training)
        if step == scene.get("save_at"):
            save(training)
    Phase.now = "publish"
    publish_again(training) if scene.get("is_damaged") else training.publish()()
    Phase.now = "save"
    save(training)
    Phase.now = "export"
    training.export()
    setup = json.loads((out / "trainer.json").read_text())
    training.close()
    (out / "result.json").write_text(json.dumps({"metrics": metrics, "setup": setup}))


def share_one_group() -> list[Ranks]:
    """All scenes meet once: DeepSpeed keeps the groups that it made, as if a process trained but once."""
    met: list[Ranks] = []

    def join(*arguments: Any, **options: Any) -> Ranks:
        if not met:
            met.append(RIGHT_JOIN(*arguments, **options))
        return met[0]

    Ranks.join = join  # type: ignore[method-assign]
    Ranks.close = lambda self: None  # type: ignore[method-assign]
    return met


def main(job: Path, rank: int) -> None:
    faulthandler.dump_traceback_later(HANG_S)
    torch.set_num_threads(1)
    met = share_one_group()
    die_with_parent(os.getppid())
    for scene in json.loads(job.read_text()):
        spec = ProcessSpec.model_validate(scene["spec"])
        spec = spec.model_copy(update={"rank": rank, "name": f"trainer-{rank}" if rank else "trainer"})
        is_wrong = scene.get("is_mean_of_each_rank", False)
        batch_module._mini_batch = mean_of_each_rank(spec.num_ranks) if is_wrong else RIGHT_MINI_BATCH
        policy_start.sliced_source = (lambda *_: None) if scene.get("is_whole") else RIGHT_SOURCE
        if scene.get("victim") == rank:
            may_die(scene["phase"])
        rank_parts.put_bytes = RIGHT_PUT
        if rank and scene.get("full_on") == rank:
            fill_disk()
        print("scene", Path(spec.run_dir).name, flush=True)
        training = Training(spec)
        if rank:
            Follower(training, Activity()).run()
        else:
            lead(training, scene, job.parent)
    RIGHT_CLOSE(met[0])
    print("done", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException as error:
        leave_at_once(error)
