"""Lineage of a real run with a resume and a restart of its trainer: complete both ways for every sample."""

from __future__ import annotations

import json
import os
import signal
import sqlite3

import pytest

from areal_like.tasks import running_sum
from controller.run_folder.run_folder import RunFolder
from controller.runs.lineage.answer import answer, gaps
from controller.runs.lineage.chain import Member
from controller.runs.lineage.command import open_graph
from controller.runs.lineage.graph import Node, walk

pytestmark = pytest.mark.e2e

SETTINGS = [
    "warm_start=null", "num_steps=24", "groups_per_step=4", "group_size=2", "sampling.max_new_tokens=8",
    "eval.every_steps=0", "data.eval=null", "metrics.report=false", "trainer.checkpoint.every_steps=5",
    "trainer.checkpoint.keep=2", "replay_buffer={groups_per_step: 1, max_age: 2}",
]  # fmt: skip
STEP = 4 * 2
"""Samples of a step."""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.thorough
def test_every_sample_of_a_resumed_run_with_a_restarted_trainer_has_both_directions(areal, quickstart, gate, tmp_path):
    """The job cleans its rows. The trainer is killed after step 6, the controller after step 11; then the file goes."""
    rows = [json.dumps(row) for row in running_sum.rows(1, "train", limit=200)]
    (tmp_path / "raw.jsonl").write_text("\n".join(["{", *rows]) + "\n")
    data = [f"data.train={{path: {tmp_path}/raw.jsonl, stages: [schema]}}"]
    run = areal("train", quickstart, *SETTINGS, *data, *gate.after(STEP * 9))
    run.wait_for_step(6)
    run.wait_until(lambda: (run.folder / "checkpoints" / "step_000005").is_dir(), "a checkpoint")
    kill(run.pid_of("trainer"))
    run.wait_until(lambda: "the trainer restarts from version" in run.output, "a restart of the trainer")
    gate.open()
    run.wait_for_step(11)
    (tmp_path / "gate.closed").touch()  # no more than the steps whose samples were scored by now
    kill(run.process.pid)
    run.process.wait()
    gate.open()
    (tmp_path / "raw.jsonl").unlink()
    resumed = areal("resume", str(run.folder))
    assert resumed.wait() == 0, resumed.output
    check_every_sample(RunFolder(run.folder), tmp_path)


def check_every_sample(folder: RunFolder, place) -> None:
    graph = open_graph(folder)
    assert gaps(graph) == []
    assert len(graph.chain.lineages) == 3, "the start, the trainer's restart and the resume"
    with sqlite3.connect(folder.ledger) as db:
        consumed = dict(db.execute("SELECT group_id, step FROM groups WHERE fate = 'consumed'"))
        samples = db.execute("SELECT group_id, sample_index, is_kept FROM samples").fetchall()
    last = graph.chain.version(24)
    assert last is not None
    down = {one: walk([one], graph.children)[0] for one in {Node("row", row) for row in graph.used_rows()}}
    up, _ = walk([Node("version", last)], graph.parents)
    final = Node("export", str(folder.final))
    for group, index, is_kept in samples:
        node = Node("sample", Member(group, index))
        (row,) = graph.parents(node)
        assert node in down[row]
        original = graph.rows.originals(str(row.key))[0]
        line = int(str(row.key).rpartition(":")[2])
        assert [one["where"] for one in original] == [f"{place}/raw.jsonl:{line + 1}"], "raw.jsonl has one line more"
        used = [one.key for one in graph.children(node)]
        if is_kept and group in consumed:
            assert consumed[group] in [version.step for version in used]
            assert node in up
            assert final in down[row]
        else:
            assert used == []
    replaced = [one for one in graph.chain.batches if graph.chain.is_replaced(one)]
    assert replaced, "steps that were trained again"
    row = Node("row", graph.place(graph.chain.batches[replaced[-1]].members[0].group))
    assert Node("version", replaced[-1]) in down[row]
    assert {Node("version", one) for one in graph.chain.batches} >= {one for one in down[row] if one.kind == "version"}
    for name, model in graph.models.items():
        found = answer(graph, [Node(model.kind, name)])
        steps = {one.key for one in found.of_kind("batch", found.came_from)}
        assert steps == set(graph.chain.history(model.version))
    assert any(not one.is_stored for one in graph.models.values()), "removed by retention, and still named"
