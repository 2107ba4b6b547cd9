"""Run folders of every kind, made by hand: what the commands that look at runs are tested on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_like.trajectory import Segment, Trajectory
from areal_like.verdict import Verdict
from controller.coordinator.effects import DropGroup, RecordBatch, RecordGroup, RecordLineage, StoreFinished
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.ledger import Ledger, LedgerEntry
from controller.run_folder.run_folder import RunFolder

KINDS = ("running", "finished", "stopped", "failed", "crashed", "foreign")


def make_run(runs_dir: Path, kind: str = "finished", name: str = "", **state: Any) -> RunFolder:
    """A folder that `whereabouts` judges to be of this kind. A running one is run by the test itself."""
    folder = RunFolder.create(runs_dir, name or kind)
    recorded: Any = "running" if kind in ("crashed", "foreign") else kind
    folder.write_state(
        recorded, command="train", reason={"failed": "trainer: disk full", "finished": "6 steps done"}.get(kind, "")
    )
    if kind == "crashed":
        edit_state(folder, controller_pid=dead_pid())
    if kind == "foreign":
        edit_state(folder, host="far-away", boot_id="another")
    edit_state(folder, **state)
    write_status(folder, status=recorded)
    write_metrics(folder)
    if kind == "finished":
        folder.summary.write_text(json.dumps(SUMMARY))
    write_logs(folder)
    return folder


SUMMARY = {
    "status": "completed", "accuracy_before": 0.235, "accuracy_after": 0.953, "wall_s": 213.2, "steps": 6,
    "samples_per_s": 220.1, "trainer_wait_share": 0.0104, "rollout_idle_share": 0.2817, "audit": "clean",
    "accuracy_by_version": {"0": 0.235, "6": 0.953},
}  # fmt: skip


def edit_state(folder: RunFolder, **facts: Any) -> None:
    """Overwrite keys of the state file; None removes one."""
    state = {**json.loads(folder.state.read_text()), **facts}
    folder.state.write_text(json.dumps({key: value for key, value in state.items() if value is not None}))


def dead_pid() -> int:
    """Of a process that has ended."""
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    return gone.pid


def process_row(role: str, state: str = "generate", **counters: float) -> dict[str, Any]:
    return {"role": role, "state": state, "pid": 4242, "incarnation": "a1", "rss_mb": 312.4, "counters": counters}


def write_status(folder: RunFolder, *, age_s: float = 0.3, **facts: Any) -> None:
    """status.json as a running controller writes it, `age_s` ago."""
    status = {
        "format": 1, "time_s": time.time() - age_s, "run": folder.name, "status": "running", "host": "here", "pid": 1,
        "step": 3, "num_steps": 6, "version": 3, "elapsed_s": 82.0, "eta_s": 450.0,
        "waits": ["trainer waits for batch 4: 5 of 12 groups ready; rollout-0 holds 48 samples"],
        "counts": {"drawn": 60, "consumed": 36, "filtered": 0, "dropped": 0, "running": 19, "ready": 5},
        "processes": {
            "reward": process_row("reward", "score", scored=400.0, busy_s=4.0),
            "rollout-0": process_row("rollout", tokens=30_000.0, busy_s=9.0, idle_s=1.0, paused_s=0.0),
            "trainer": process_row("trainer", "wait:batch", tokens=20_000.0, busy_s=5.0, wait_s=5.0),
        },
        "last_step": {"step": 3, "time_s": time.time() - age_s - 2, "reward_mean": 0.41, "loss": -0.0012},
        "accuracy": {"0": 0.235, "3": 0.61}, "preparing": "",
    }  # fmt: skip
    folder.status.write_text(json.dumps({**status, **facts}))


def write_metrics(folder: RunFolder, *, age_s: float = 10.0) -> None:
    """Steps, and one pulse `age_s` ago with half of what status.json counts."""
    now_s = time.time()
    rows: list[dict[str, Any]] = [
        {"kind": "step", "time_s": now_s - 20 + 4 * step, "step": step, "reward_mean": 0.3 + 0.05 * step, "loss": 0.01}
        for step in (1, 2, 3)
    ]
    rows.append({"kind": "eval", "time_s": now_s - 25, "version": 0, "accuracy": 0.235})
    rows.append(
        {
            "kind": "pulse", "time_s": now_s - age_s, "version": 2, "waits": [], "counts": {},
            "processes": {
                "reward": process_row("reward", scored=200.0, busy_s=2.0),
                "rollout-0": process_row("rollout", tokens=10_000.0, busy_s=1.0, idle_s=0.0, paused_s=0.0),
                "trainer": process_row("trainer", tokens=10_000.0, busy_s=1.0, wait_s=0.0),
            },
        }
    )  # fmt: skip
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "step", "ste')


def write_logs(folder: RunFolder) -> None:
    """Three processes that spoke in turns; one of them with a traceback."""
    (folder.logs / "controller.log").write_text(
        "2026-11-21 10:00:00,000 INFO controller controller.runtime.server: begins\n"
        "2026-11-21 10:00:04,000 INFO controller controller.runtime.server: ends\n"
    )
    (folder.logs / "trainer.log").write_text(
        "2026-11-21 10:00:02,000 INFO trainer trainer.worker: step 1\nTraceback (most recent call last):\n"
        "ValueError: no\n2026-11-21 10:00:05,000 INFO trainer trainer.worker: leaves\n"
    )
    (folder.logs / "rollout-0.log").write_text(
        "2026-11-21 10:00:01,000 INFO rollout-0 rollout.worker: connected\n"
        "2026-11-21 10:00:03,000 INFO rollout-0 rollout.worker: version 1\n"
    )


# ---------------------------------------------------------------- samples


def byte_tokenizer() -> Tokenizer:
    """One token a byte after <bos> and <eos>; characters of several bytes are several tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<bos>": 0, "<eos>": 1, **{symbol: 2 + i for i, symbol in enumerate(symbols)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer


def sample_entry(
    group_id: int,
    index: int,
    answer: str,
    value: float | None,
    *,
    prompt: str = "2+2=",
    versions: Sequence[int] | None = None,
    verdict: Verdict | None = None,
    finish: Any = "stop",
) -> LedgerEntry:
    """A finished sample whose answer was sampled under these versions, one a token (default: all version 0)."""
    tokenizer = byte_tokenizer()
    answer_ids = [*tokenizer.encode(answer).ids, *([1] if finish == "stop" else [])]
    stamped = list(versions) if versions is not None else [0] * len(answer_ids)
    stamped += [stamped[-1]] * (len(answer_ids) - len(stamped))
    segment = Segment(
        np.asarray(answer_ids, np.int32), np.full(len(answer_ids), -0.5, np.float32), np.asarray(stamped, np.int32)
    )
    prompt_ids = np.asarray([0, *tokenizer.encode(prompt).ids], np.int32)
    found = verdict or Verdict(kind="scored", value=value, components={"correct": value or 0.0, "format": 1.0})
    outcome = SampleOutcome(
        lease_id=100 * group_id + index, group_id=group_id, sample_index=index,
        num_tokens=len(answer_ids), first_version=stamped[0], last_version=stamped[-1], verdict_kind=found.kind,
        value=found.value,
    )  # fmt: skip
    effect = StoreFinished(purpose="train", outcome=outcome, value=value, is_kept=value is not None)
    return LedgerEntry(
        effect=effect, trajectories=(Trajectory.from_prompt(prompt_ids, segment, finish),), response_text=answer,
        verdict=found, worker="rollout-0", timings={"generate_s": 0.5},
    )  # fmt: skip


def open_ledger(folder: RunFolder, **settings: Any) -> Ledger:
    return Ledger(folder.root, run_id="r", **settings)


LINEAGE = RecordLineage(
    lineage="l0", checkpoint_version=0, groups_per_step=1, group_size=2, max_staleness=2, on_stale="wait"
)
NASTY = '<script>alert("x")</script> & \x1b[31mred ünï 東京'


def fill_ledger(ledger: Ledger) -> None:
    """Groups 0 and 1 used by steps 1 and 2, group 2 dropped, group 3 waiting; two samples each."""
    ledger.apply([LedgerEntry(effect=LINEAGE)])
    for group_id in range(4):
        ledger.apply([LedgerEntry(effect=RecordGroup(group_id=group_id, version=0, started=group_id + 1))])
    ledger.apply([
        sample_entry(0, 0, "four", 1.0),
        sample_entry(0, 1, "東京 five", 0.25, versions=[0] * 6 + [1]),
        sample_entry(1, 0, "x" * 3000 + " the end", -1.0, finish="length"),
        sample_entry(1, 1, NASTY, 0.5, prompt="<b>say</b>", versions=[0, 0, 1, 1, 2]),
        sample_entry(2, 0, "none", None, verdict=Verdict(kind="timed_out", reason="after 10 s")),
        sample_entry(3, 0, "later", 0.75, versions=[1]),
    ])  # fmt: skip
    for step, group_id in ((1, 0), (2, 1)):
        group = BatchGroup(group_id=group_id, sample_indices=(0, 1), first_version=0)
        batch = RecordBatch(step=step, lineage="l0", groups=(group,), is_replay=False)
        ledger.apply([LedgerEntry(effect=batch)])
    ledger.apply([LedgerEntry(effect=DropGroup(group_id=2, reason="verdict_timed_out"))])


def make_sampled_run(runs_dir: Path, kind: str = "finished", name: str = "") -> RunFolder:
    """A run with a ledger of samples and a tokenizer next to its final model."""
    folder = make_run(runs_dir, kind, name)
    with open_ledger(folder) as ledger:
        fill_ledger(ledger)
    give_tokenizer(folder.final)
    return folder


def give_tokenizer(place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(place / "tokenizer.json"))
