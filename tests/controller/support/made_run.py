"""Runs made up for the tests of report and diagnosis: steps and pulses with chosen shares, and a folder with a ledger.

Shares are what is chosen; seconds follow from `step_s`, so that a test can make the machine ten times slower.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from areal_like.trajectory import Segment, Trajectory
from areal_like.verdict import Verdict
from controller.coordinator.effects import RecordBatch, RecordGroup, RecordLineage, StoreFinished
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.ledger import Ledger, LedgerEntry
from controller.ledger.sample_reader import SampleStats
from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.report.finding import Finding
from controller.run_folder.owner_host import Kind, Whereabouts
from controller.run_folder.run_folder import RunFolder

CONFIG: dict[str, Any] = {
    "mode": "async",
    "num_steps": 40,
    "groups_per_step": 48,
    "group_size": 8,
    "staleness": {"max_staleness": 2, "on_stale": "wait"},
    "sampling": {"max_new_tokens": 100},
    "rollout": {"num_workers": 1, "threads": "auto", "engine": {"num_slots": 128, "device": "cpu"}},
    "reward": {"num_workers": 1, "scorers": [{"kind": "mine:score"}], "on_failure": "drop_sample"},
    "trainer": {
        "device": "cpu", "threads": "auto", "optimizer": {"lr": 1e-4}, "weights": {"kind": "shm"},
        "micro_batch_tokens": 2048, "loss": {"kl_coef": 0.0, "weight": {"mode": "truncate"}},
    },
}  # fmt: skip


def config(**changes: Any) -> dict[str, Any]:
    """CONFIG with `a__b=value` for a.b."""
    made = json.loads(json.dumps(CONFIG))
    for path, value in changes.items():
        *above, last = path.split("__")
        place = made
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return made


def step_rows(num_steps: int = 40, step_s: float = 1.0, **series: Sequence[float] | float) -> list[dict[str, Any]]:
    """Step rows of a run that learns; `series` replaces columns, a number standing for all steps."""
    rise = np.linspace(0.4, 0.9, num_steps)
    columns: dict[str, Any] = {
        "reward_mean": rise, "reward_std": np.sqrt(rise * (1 - rise)), "groups": 48.0,
        "entropy": np.linspace(0.1, 0.03, num_steps),
        "ess": 0.99, "kl_behaviour_proximal": 0.005, "clip_fraction": 0.0, "weight_truncated_share": 1e-4,
        "grad_norm": 0.2, "grad_norm_max": 0.2, "response_len_mean": 28.0, "cut_share": 0.0, "loss": 0.1,
        "packing_efficiency": 0.94, "micro_batches": 7.0, "updates": 1.0, "skipped_updates": 0.0,
        "staleness_mean": 1.9, "trainer_wait_share": 0.02, "advantage_abs_mean": 0.4, **series,
    }  # fmt: skip
    full = {key: np.broadcast_to(np.asarray(value, dtype=float), num_steps) for key, value in columns.items()}
    return [
        {
            "kind": "step", "step": n + 1, "time_s": 1000.0 + (n + 1) * step_s, "wall_s": (n + 1) * step_s,
            **{key: float(values[n]) for key, values in full.items()},
        }
        for n in range(num_steps)
    ]  # fmt: skip


def pulse_rows(
    num_steps: int = 40,
    step_s: float = 1.0,
    *,
    wait: float = 0.02,
    busy: float = 0.765,
    paused: float = 0.005,
    for_scores: float = 0.0,
    slots_full: float = 0.9,
    slots: int = 128,
    workers: int = 1,
    queue: float = 0.0,
    scoring: float = 0.05,
    waiting: float = 4.0,
    verdicts: dict[str, float] | None = None,
    rss: Sequence[float] | None = None,
    groups_per_step: int = 48,
    makes_steps: bool = True,
    cores: float = 4.0,
    used: Mapping[str, float] = {"trainer": 0.9, "rollout-0": 0.6, "controller": 0.1},
    queued: Mapping[str, float] | None = None,
    others: float = 0.0,
) -> list[dict[str, Any]]:
    """A pulse at each step; rollouts idle for what `busy` and `paused` leave. waiting: samples without their score.

    queued: share of time in which a thread of each process waited for a core, None for pulses that do not tell it.
    others: cores of the machine that other programs used.
    """
    per_step = verdicts or {"scored": 384.0}
    idle = 1.0 - busy - paused
    rows = []
    for n in range(num_steps + 1):
        s = n * step_s
        rollout = {
            "busy_s": busy * s, "paused_s": paused * s, "idle_s": idle * s, "wait_score_s": for_scores * s,
            "wait_work_s": (idle - for_scores) * s, "score_wait_s": waiting * s / workers,
            "steps": 100.0 * n, "tokens": 100.0 * n * slots_full * slots,
        }  # fmt: skip
        reward = {
            "queue": queue, "busy_workers": scoring, "scorer.mine:score.busy_s": scoring * s,
            "scorer.mine:score.p95_s": 0.3 * step_s, **{kind: count * n for kind, count in per_step.items()},
            **{f"scorer.mine:score.{kind}": count * n for kind, count in per_step.items() if kind != "scored"},
        }  # fmt: skip
        size = float(rss[n]) if rss is not None else 500.0
        processes = {
            "trainer": process("trainer", {"wait_s": wait * s, "busy_s": (1 - wait) * s}, size),
            "reward": process("reward", reward, 100.0),
            **{f"rollout-{k}": process("rollout", rollout, 300.0) for k in range(workers)},
        }
        rows.append(
            {
                "kind": "pulse", "time_s": 1000.0 + s, "wall_s": s, "version": n if makes_steps else 0, "waits": [],
                "counts": {"drawn": min(n + 3, num_steps) * groups_per_step, "filtered": 0, "dropped": 0},
                "processes": processes,
                "processor": {"cores": cores, "cpu_s": {name: share * s for name, share in used.items()}}
                | ({} if queued is None else {
                    "queue_s": {name: share * s for name, share in queued.items()},
                    "machine": {"cores": int(cores), "busy_s": 500.0 + (others + sum(used.values())) * s},
                }),
            }
        )  # fmt: skip
    return rows


def process(role: str, counters: dict[str, float], rss_mb: float, incarnation: str = "a") -> dict[str, Any]:
    return {
        "role": role, "state": "busy", "pid": 1, "incarnation": incarnation, "rss_mb": rss_mb, "counters": counters
    }  # fmt: skip


def made_run(
    *,
    kind: Kind = "finished",
    steps: list[dict[str, Any]] | None = None,
    pulses: list[dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
    reason: str = "",
    folder: Path = Path("/runs/made"),
    **more: Any,
) -> RunData:
    """RunData of a healthy run of 40 steps, but for what is given."""
    state = {"format": 1, "status": kind if kind not in ("crashed", "foreign") else "running", "reason": reason}
    return RunData(
        folder=RunFolder(folder),
        state=state,
        config=settings if settings is not None else config(),
        steps=step_rows() if steps is None else steps,
        pulses=pulse_rows() if pulses is None else pulses,
        where=Whereabouts(kind, kind, state),
        **{"summary": {"audit": "clean", "steps": 40}, "status": None, "cores": 2, **more},
    )


def stats(values: np.ndarray, *, group_size: int = 8, groups_per_step: int = 2, **more: Any) -> SampleStats:
    """Sample statistics of these rewards, in order of steps and groups."""
    n = len(values)
    group = np.arange(n) // group_size
    return SampleStats(
        **{
            "step": group // groups_per_step + 1, "length": np.full(n, 20), "value": np.asarray(values, dtype=float),
            "staleness": np.zeros(n, dtype=int), "group": group, "is_cut": np.zeros(n, dtype=bool), "components": {},
            "verdicts": {"scored": n}, "failures": {}, "components_by_step": {}, "fates": {"consumed": n // group_size},
            "dropped_by_reason": {}, "timings_s": {}, "share": 1.0, **more,
        }
    )  # fmt: skip


def verdict(**run: Any) -> Finding:
    """The first finding of such a run."""
    return diagnose(made_run(**run))[0]


def titles(found: list[Finding]) -> str:
    """All titles in one line."""
    return " | ".join(finding.title for finding in found)


# ------------------------------------------------------------ a folder


def write_run(root: Path, *, num_steps: int = 10, groups_per_step: int = 3, group_size: int = 4) -> RunFolder:
    """A finished run as files: state, config, metrics, summary, status and a real ledger."""
    root.mkdir(parents=True)
    folder = RunFolder(root)
    now = {"format": 1, "run_id": "r", "status": "finished", "reason": f"{num_steps} steps done", "controller_pid": 1}
    folder.state.write_text(json.dumps({**now, "controller_started_s": 0.0, "updated_s": 1.0}))
    settings = config(num_steps=num_steps, groups_per_step=groups_per_step, group_size=group_size)
    folder.config.write_text(yaml.safe_dump(settings))
    folder.summary.write_text(json.dumps({"steps": num_steps, "audit": "clean", "dropped_by_reason": {}}))
    (root / "status.json").write_text(json.dumps({"format": 1, "time_s": 1.0, "waits": []}))
    evals = [{"kind": "eval", "time_s": 1.0, "version": v, "accuracy": 0.3, "num_scored": 64} for v in (0, num_steps)]
    swaps = [{"kind": "swap", "worker": "rollout-0", "version": 1, "stage_s": 0.01, "pause_s": 0.001}]
    pulses = pulse_rows(num_steps, groups_per_step=groups_per_step)
    rows = [*evals[:1], *step_rows(num_steps), *pulses, *swaps, *evals[1:]]
    folder.metrics.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    write_ledger(root, num_steps=num_steps, groups_per_step=groups_per_step, group_size=group_size)
    return folder


def write_ledger(root: Path, *, num_steps: int, groups_per_step: int, group_size: int) -> None:
    """Every step consumes its groups, one version behind; rewards alternate; every fourth sample is cut."""
    with Ledger(root, run_id="r") as ledger:
        ledger.apply(
            [LedgerEntry(effect=RecordLineage(
                lineage="l0", checkpoint_version=0, groups_per_step=groups_per_step, group_size=group_size,
                max_staleness=2, on_stale="wait",
            ))]
        )  # fmt: skip
        for step in range(1, num_steps + 1):
            version = max(0, step - 2)
            entries, batch = [], []
            for place in range(groups_per_step):
                group_id = (step - 1) * groups_per_step + place
                begun = RecordGroup(group_id=group_id, version=version, started=group_id + 1)
                entries.append(LedgerEntry(effect=begun))
                entries += [_sample(group_id, index, version) for index in range(group_size)]
                batch.append(
                    BatchGroup(group_id=group_id, sample_indices=tuple(range(group_size)), first_version=version)
                )
            entries.append(
                LedgerEntry(effect=RecordBatch(step=step, lineage="l0", groups=tuple(batch), is_replay=False))
            )
            ledger.apply(entries)


def _sample(group_id: int, index: int, version: int) -> LedgerEntry:
    value, length = float(index % 2), 5 + index
    segment = Segment(
        np.arange(length, dtype=np.int32), np.full(length, -0.5, np.float32), np.full(length, version, np.int32)
    )
    return LedgerEntry(
        effect=StoreFinished(
            purpose="train", value=value, is_kept=True,
            outcome=SampleOutcome(
                group_id=group_id, sample_index=index, lease_id=group_id * 100 + index, num_tokens=length,
                first_version=version, last_version=version, verdict_kind="scored", value=value,
            ),
        ),
        trajectories=(
            Trajectory.from_prompt(np.arange(3, dtype=np.int32), segment, "length" if index == 3 else "stop"),
        ),
        verdict=Verdict(kind="scored", value=value, components={"correct": value}),
        timings={"generate_s": 0.3, "score_s": 0.1},
        worker="rollout-0",
    )  # fmt: skip
