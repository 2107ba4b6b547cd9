"""Processes die at the worst moment: nothing hangs, nothing is used twice or lost, nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import sqlite3

import pytest

from controller.ledger.schema import decode_groups
from controller.runs.replay.tensors import digests_in, total

pytestmark = pytest.mark.e2e

STEPS = 10
LONGER = [f"num_steps={STEPS}", "trainer.checkpoint.every_steps=4"]


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def assert_whole(run, steps):
    summary = run.summary
    assert summary["steps"] == steps
    assert summary["audit"] == "clean"
    assert summary["samples_consumed"] == steps * 12 * 4


def test_killed_worker_and_killed_reward_service_are_replaced_and_the_run_finishes(areal, quickstart, short, gate):
    run = areal("train", quickstart, *short, *LONGER, *gate.after_step(3))
    run.wait_for_step(3)
    for module in ("rollout", "services.reward"):
        kill(run.pid_of(module))
    gate.open()
    assert run.wait() == 0, run.output
    assert run.output.count("restarting it") == 2
    assert_whole(run, STEPS)


@pytest.mark.thorough
def test_killed_controller_leaves_no_process_and_resume_finishes(areal, quickstart, short, gate, own_forkserver):
    run = areal("train", quickstart, *short, *LONGER, *gate.after_step(6))
    run.wait_for_step(6)
    family = run.family()
    assert len(family) >= 4
    kill(run.process.pid)
    gate.open()
    assert not run.survivors(family, timeout_s=15)
    own_forkserver()
    resumed = areal("resume", str(run.folder))
    assert resumed.wait() == 0, resumed.output
    assert_whole(resumed, STEPS)


@pytest.mark.thorough
def test_replayed_steps_repeat_the_first_time_bit_by_bit(areal, quickstart, short, gate):
    """`exactly-once`: recorded batches after the checkpoint are trained again, in order, from its exact state."""
    held = gate.after_step(7, mode="sync")
    run = areal("train", quickstart, *short, *LONGER, *held, "mode=sync", "trainer.mini_batches=2")
    run.wait_for_step(7)
    kill(run.process.pid)
    run.process.wait()
    gate.open()
    resumed = areal("resume", str(run.folder))
    assert resumed.wait() == 0, resumed.output
    rows = resumed.metrics("step")
    replayed = [row for row in rows if row["is_replay"]]
    assert [row["step"] for row in replayed] == [5, 6, 7]
    for again in replayed:
        first = next(row for row in rows if row["step"] == again["step"])
        assert not first["is_replay"]
        for key in ("loss", "grad_norm", "reward_mean", "entropy", "kl_behaviour_proximal"):
            assert again[key] == first[key], (again["step"], key)
    assert_whole(resumed, STEPS)


def test_killed_trainer_starts_again_from_its_checkpoint_and_the_run_finishes(areal, quickstart, short, gate):
    """Weights by `stream`: the workers lose the server of their versions, and find the next one. Repeated steps reuse
    the groups of earlier steps that they reused first. A replay of the finished run ends with the same weights."""
    more = ["trainer.weights.kind=stream", "trainer.checkpoint.every_steps=5"]  # 6 to 9 steps are made before the kill
    more += ["replay_buffer={groups_per_step: 3, max_age: 2}"]
    run = areal("train", quickstart, *short, *LONGER, *more, *gate.after_step(6))
    run.wait_for_step(6)
    run.wait_until(lambda: (run.folder / "checkpoints" / "step_000005").is_dir(), "a checkpoint")
    kill(run.pid_of("trainer"))
    gate.open()
    assert run.wait() == 0, run.output
    assert "the trainer restarts from version " in run.output
    assert "quarantined" not in run.output
    assert "trainer: ended with signal SIGKILL" in run.output
    assert_whole(run, STEPS)
    assert (run.summary["lives"], run.summary["trainer_restarts"]) == (1, 1)
    assert [row["step"] for row in run.metrics("step")] == list(range(1, STEPS + 1)), "no step is reported twice"
    with sqlite3.connect(run.folder / "ledger.sqlite") as db:
        rows = db.execute("SELECT reason, checkpoint_version FROM trainer_restarts JOIN lineages USING (lineage)")
        ((reason, base),) = rows.fetchall()
        replayed = [step for (step,) in db.execute("SELECT step FROM batches WHERE is_replay ORDER BY seq")]
        records = db.execute("SELECT step, groups, reused FROM batches").fetchall()
    assert reason == "trainer: ended with signal SIGKILL"
    assert base == 5
    assert replayed == list(range(base + 1, base + 1 + len(replayed)))
    assert replayed
    assert len(set(records)) == STEPS, "a repeated step has the groups of the first time"
    reused = {step: 4 * len(decode_groups(blob)) for step, _, blob in records if blob}
    assert 2 in reused, "all groups of step 1 may be reused in step 2"
    assert {row["step"]: row["reused_samples"] for row in run.metrics("step") if "reused_samples" in row} == reused
    assert "SIGKILL" in areal_report(run)
    replayed = areal("replay", str(run.folder))
    assert replayed.wait() == 0, replayed.output
    assert "from the starting model; the trainer was started 2 times, at versions 0, 5" in replayed.output
    final = digests_in(run.folder / "final")
    assert f"final ({len(final)} tensors): equal, sha256 {total(final)}" in replayed.output
    assert f"equal: {STEPS} steps" in replayed.output
    again = areal("replay", str(run.folder), "--engine", "--samples", "40")
    assert again.wait() == 0, again.output
    assert re.search(r"versions: \d+ of the starting model or a checkpoint, \d+ by replaying the trainer", again.output)
    assert re.search(r"^equal: 40 samples with \d+ tokens, in ", again.output, re.MULTILINE)


def areal_report(run):
    from controller.report.page import write_report
    from controller.run_folder.run_folder import RunFolder

    return write_report(RunFolder(run.folder)).read_text()


@pytest.mark.thorough
def test_killed_trainer_without_a_budget_ends_the_run_with_its_words_and_resume_finishes(
    areal, quickstart, short, gate
):
    run = areal("train", quickstart, *short, *LONGER, *gate.after_step(6), "trainer.max_restarts=0")
    run.wait_for_step(6)
    family = run.family()
    kill(run.pid_of("trainer"))
    gate.open()
    assert run.wait() == 1
    assert "trainer" in run.output.splitlines()[-1]
    assert not run.survivors(family, timeout_s=15)
    resumed = areal("resume", str(run.folder))
    assert resumed.wait() == 0, resumed.output
    assert_whole(resumed, STEPS)


def test_stopped_worker_is_found_silent_and_replaced(areal, quickstart, short, gate):
    run = areal("train", quickstart, *short, *LONGER, *gate.after_step(3), "launch.silence_s=4")
    run.wait_for_step(3)
    os.kill(run.pid_of("rollout"), signal.SIGSTOP)
    gate.open()
    assert run.wait() == 0, run.output
    assert "silent" in run.output
    assert_whole(run, STEPS)


@pytest.mark.usefixtures("own_forkserver")
def test_ctrl_c_finishes_the_step_saves_and_exits_zero(areal, quickstart, short):
    run = areal("train", quickstart, *short, "num_steps=200")
    run.wait_for_step(2)
    family = run.family()
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 0, run.output
    assert not run.survivors(family, timeout_s=10)
    steps = run.summary["steps"]
    assert 2 <= steps < 200
    assert (run.folder / "checkpoints" / f"step_{steps:06d}").is_dir()
    assert run.summary["audit"] == "clean"


def test_two_signals_stop_at_once(areal, quickstart, short):
    run = areal("train", quickstart, *short, "num_steps=200")
    run.wait_for_step(2)
    family = run.family()
    os.kill(run.process.pid, signal.SIGINT)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() != 0
    assert "Traceback" not in run.output
    assert not run.survivors(family, timeout_s=10)


def test_failing_process_ends_the_run_with_its_own_error(areal, quickstart, short, tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    run = areal("train", quickstart, *short, "reward.scorers=[{kind: 'broken:score'}]")
    assert run.wait() == 2
    assert "nothing_of_that_name" in run.output
    assert "Traceback" not in run.output
