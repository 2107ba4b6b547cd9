"""A finished run with a ledger, checkpoints, a final model and a seal, made without processes, and forgeries of it."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from ledger_entries import finished, partial
from real_ledger import entry_of
from safetensors.numpy import save_file
from schedules import run_schedule

from controller.coordinator.draws import SkippedDraw
from controller.coordinator.effects import (
    DropGroup,
    Effect,
    FilterGroup,
    RecordCheckpoint,
    RecordEval,
    RecordGroup,
    RecordIncident,
    RecordSkips,
)
from controller.coordinator.settings import CoordinatorSettings
from controller.ledger.ledger import Ledger, LedgerEntry
from controller.ledger.schema import decode_groups, encode_groups
from controller.ledger.segment_store import HEADER, MAGIC
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.seal import SEAL_FILE, write_seal
from trainer.checkpoints.checkpoint import CheckpointState, Retention, manifest_digest, save
from trainer.checkpoints.convert import export_checkpoint

NUM_STEPS = 6
CONFIG = "num_steps: {num_steps}\ngroups_per_step: 2\ngroup_size: 2\n"


def save_checkpoint(root: Path, version: int, lineage: str, run_id: str = "r") -> Path:
    """A checkpoint with small weights, which differ by version and lineage."""

    def write(folder: Path) -> None:
        scale = version + 0.125 * len(lineage) + 0.5 * int(lineage[1:] or 0)
        save_file({"w": np.arange(8, dtype=np.float32) * scale}, folder / "model.safetensors")
        save_file({"m/w": np.full(8, scale, np.float32)}, folder / "optimizer.safetensors")
        (folder / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')

    state = CheckpointState(version=version, lineage=lineage, run_id=run_id, config_digest="")
    return save(root, state, write, Retention(keep=3))[0]


def record(ledger: Ledger, root: Path, entries: list[tuple[Effect, list[int] | None]]) -> None:
    """Write entries; a recorded checkpoint is first saved. Rewards differ between the samples of a group."""
    made: list[LedgerEntry] = []
    for effect, versions in entries:
        known = effect
        if isinstance(effect, RecordCheckpoint):
            digest = manifest_digest(save_checkpoint(root, effect.version, effect.lineage))
            known = msgspec.structs.replace(effect, digest=digest)
        made.append(entry_of(known, versions))
    ledger.apply(made)


def make_recorded_run(
    runs_dir: Path, seed: int = 3, *, name: str = "recorded", num_steps: int = NUM_STEPS
) -> RunFolder:
    """A finished run with a fall-back in between."""
    folder = RunFolder.create(runs_dir, name)
    folder.write_state("finished", run_id="r", command="train", reason=f"{num_steps} steps done")
    settings = CoordinatorSettings(
        groups_per_step=2, group_size=2, num_steps=num_steps, max_staleness=2, num_workers=2, max_filtered_batches=0
    )
    with Ledger(folder.root, run_id="r", segment_bytes=2000, keep_bytes=None) as ledger:
        run_schedule(seed, settings=settings, mirror=lambda entries: record(ledger, folder.root, entries))
        ledger.apply(other_facts(ledger, num_steps))
    folder.config.write_text(CONFIG.format(num_steps=num_steps))
    rows = [{"kind": "step", "step": step, "time_s": 1e9 + step, "loss": 0.5} for step in range(1, num_steps + 1)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.summary.write_text(json.dumps({"steps": num_steps, "audit": "clean"}))
    export_checkpoint(folder.checkpoints / f"step_{num_steps:06d}", folder.final, dtype="bfloat16")
    write_seal(folder, run_id="r", last_digest=ledger.last_digest.hex())
    return folder


def other_facts(ledger: Ledger, version: int) -> list[LedgerEntry]:
    """Facts of every other kind: skips, an evaluation, an incident, a dropped, a filtered and a running group."""
    state = ledger.load()
    group_id = state.num_drawn
    started = group_id - state.num_filtered - sum(state.dropped.values()) + 1

    def admitted(number: int) -> LedgerEntry:
        return LedgerEntry(effect=RecordGroup(group_id=number, version=version, started=started, draw=number + 3))

    skips = tuple(SkippedDraw(draw=group_id + k, rate=0.875, num_tokens=12.5) for k in range(3))
    filtered = [finished(group_id + 1, [version] * 4, -0.0) for _ in range(2)]
    second = msgspec.structs.replace(filtered[1].effect.outcome, sample_index=1)  # type: ignore[attr-defined]
    filtered[1] = msgspec.structs.replace(
        filtered[1], effect=msgspec.structs.replace(filtered[1].effect, outcome=second)
    )
    return [
        LedgerEntry(effect=RecordSkips(draws=skips)),
        LedgerEntry(effect=RecordEval(version=3, lineage="l0", kind="periodic", values=(1.0, None, 0.5))),
        LedgerEntry(effect=RecordIncident(kind="incident", text="a worker was lost")),
        admitted(group_id), partial(group_id, 0, [version] * 2),
        LedgerEntry(effect=DropGroup(group_id=group_id, reason="timeout", detail="after 3 s")),
        admitted(group_id + 1), *filtered, LedgerEntry(effect=FilterGroup(group_id=group_id + 1, value=0.0)),
        admitted(group_id + 2), partial(group_id + 2, 0, [version] * 3),
    ]  # fmt: skip


def copy_run(folder: RunFolder, target: Path) -> RunFolder:
    shutil.copytree(folder.root, target)
    return RunFolder(target)


# ---------------------------------------------------------------- forgeries

Forgery = Callable[[RunFolder, random.Random], str]
"""Changes a run in one way; returns what was changed."""


def opened(folder: RunFolder) -> Any:
    return closing(sqlite3.connect(folder.ledger, isolation_level=None))


def one_row(db: sqlite3.Connection, chance: random.Random, query: str) -> Any:
    return chance.choice(db.execute(query).fetchall())


def swap_rewards(folder: RunFolder, chance: random.Random) -> str:
    with opened(folder) as db:
        first, second = chance.sample(db.execute("SELECT group_id, sample_index, value FROM samples").fetchall(), 2)
        value = second[2] if second[2] != first[2] else (first[2] or 0.0) + 1.0
        db.execute("UPDATE samples SET value = ? WHERE group_id = ? AND sample_index = ?", (value, *first[:2]))
    return f"reward of g{first[0]}.{first[1]}: {first[2]} to {value}"


def remove_sample(folder: RunFolder, chance: random.Random) -> str:
    with opened(folder) as db:
        group_id, index, seq = one_row(db, chance, "SELECT group_id, sample_index, seq FROM samples")
        db.execute("DELETE FROM samples WHERE seq = ?", (seq,))
        if is_clean := chance.random() < 0.5:
            db.execute("DELETE FROM digests WHERE seq = ?", (seq,))
    return f"removed g{group_id}.{index} {'with' if is_clean else 'without'} its digest"


def change_version(folder: RunFolder, chance: random.Random) -> str:
    table, column = chance.choice([
        ("samples", "first_version"), ("samples", "last_version"), ("groups", "version"), ("checkpoints", "version"),
        ("evals", "version"), ("lineages", "checkpoint_version"), ("groups", "step"), ("groups", "started"),
    ])  # fmt: skip
    with opened(folder) as db:
        (seq,) = one_row(db, chance, f"SELECT seq FROM {table} WHERE {column} IS NOT NULL")
        db.execute(f"UPDATE {table} SET {column} = {column} + ? WHERE seq = ?", (chance.choice((-40, 1, 40)), seq))
    return f"{column} of fact {seq}"


def edit_token(folder: RunFolder, chance: random.Random) -> str:
    """A byte of a stored payload, with a new checksum of its record."""
    with opened(folder) as db:
        group_id, index, file, offset, size = one_row(
            db, chance, "SELECT group_id, sample_index, file, offset, size FROM samples WHERE file IS NOT NULL"
        )
    path = folder.root / "segments" / f"{file:06d}.seg"
    data = bytearray(path.read_bytes())
    place = chance.randrange(offset + HEADER.size, offset + size)
    data[place] ^= 1 << chance.randrange(8)
    payload = bytes(data[offset + HEADER.size : offset + size])
    data[offset : offset + HEADER.size] = HEADER.pack(MAGIC, zlib.crc32(payload), len(payload))
    path.write_bytes(data)
    return f"byte {place} of {path.name}, in g{group_id}.{index}"


def reorder_batch(folder: RunFolder, chance: random.Random) -> str:
    with opened(folder) as db:
        seq, blob = one_row(db, chance, "SELECT seq, groups FROM batches")
        groups = list(decode_groups(blob))
        if chance.random() < 0.5:
            groups.reverse()
        else:
            where = chance.randrange(len(groups))
            turned = tuple(reversed(groups[where].sample_indices))
            groups[where] = msgspec.structs.replace(groups[where], sample_indices=turned)
        db.execute("UPDATE batches SET groups = ? WHERE seq = ?", (encode_groups(tuple(groups)), seq))
    return f"order of batch {seq}"


def flip_byte(path: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return f"byte {place} of {path}"


def edit_segment(folder: RunFolder, chance: random.Random) -> str:
    with opened(folder) as db:
        file, offset, size = one_row(db, chance, "SELECT file, offset, size FROM samples WHERE file IS NOT NULL")
    path = folder.root / "segments" / f"{file:06d}.seg"
    data = bytearray(path.read_bytes())
    place = chance.randrange(offset, offset + size)
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return f"byte {place} of {path.name}"


def edit_blob(folder: RunFolder, chance: random.Random) -> str:
    table, column = chance.choice(
        [
            ("samples", "facts"),
            ("batches", "groups"),
            ("digests", "digest"),
            ("digests", "content"),
            ("evals", '"values"'),
        ]
    )
    with opened(folder) as db:
        seq, blob = one_row(db, chance, f"SELECT seq, {column} FROM {table} WHERE {column} IS NOT NULL")
        data = bytearray(blob)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        db.execute(f"UPDATE {table} SET {column} = ? WHERE seq = ?", (bytes(data), seq))
    return f"a byte of {column} of fact {seq}"


def edit_weights(folder: RunFolder, chance: random.Random) -> str:
    files = sorted(path for path in [*folder.checkpoints.rglob("*"), *folder.final.rglob("*")] if path.is_file())
    return flip_byte(chance.choice(files), chance)


def replace_weights(folder: RunFolder, chance: random.Random) -> str:
    """Other weights in a checkpoint, with a manifest that fits them."""
    path = chance.choice(sorted(folder.checkpoints.glob("step_*")))
    changed = {"w": np.arange(8, dtype=np.float32) * chance.random()}
    manifest = json.loads((path / "manifest.json").read_text())
    save_file(changed, path / "model.safetensors")
    entry = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    manifest["files"]["model.safetensors"]["sha256"] = entry
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return f"weights and manifest of {path.name}"


def edit_metrics(folder: RunFolder, chance: random.Random) -> str:
    lines = folder.metrics.read_text().splitlines()
    place = chance.randrange(len(lines))
    if chance.random() < 0.5:
        del lines[place]
    else:
        row = json.loads(lines[place])
        lines[place] = json.dumps(row | {"step": row["step"] + chance.choice((20, 1)) * NUM_STEPS})
    folder.metrics.write_text("".join(f"{line}\n" for line in lines))
    return f"line {place} of metrics.jsonl"


def swap_checkpoints(folder: RunFolder, chance: random.Random) -> str:
    first, second = chance.sample(sorted(folder.checkpoints.glob("step_*")), 2)
    aside = folder.root / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return f"{first.name} and {second.name}"


def remove_fact(folder: RunFolder, chance: random.Random) -> str:
    table = chance.choice(["incidents", "evals", "checkpoints", "batches", "lineages", "groups"])
    with opened(folder) as db:
        (seq,) = one_row(db, chance, f"SELECT seq FROM {table}")
        db.execute(f"DELETE FROM {table} WHERE seq = ?", (seq,))
        db.execute("DELETE FROM digests WHERE seq = ?", (seq,))
    return f"fact {seq} of {table}"


def edit_text(folder: RunFolder, chance: random.Random) -> str:
    table, column = chance.choice([
        ("samples", "worker"), ("samples", "verdict_kind"), ("groups", "detail"), ("incidents", "text"),
        ("checkpoints", "path"), ("checkpoints", "lineage"), ("batches", "lineage"), ("lineages", "on_stale"),
        ("groups", "fate"),
    ])  # fmt: skip
    with opened(folder) as db:
        (seq,) = one_row(db, chance, f"SELECT seq FROM {table}")
        db.execute(f"UPDATE {table} SET {column} = {column} || 'x' WHERE seq = ?", (seq,))
    return f"{column} of fact {seq}"


def edit_sealed(folder: RunFolder, chance: random.Random) -> str:
    """Any byte of a file that the seal covers, or of the seal's digests; also the ledger's file."""
    files = [folder.root / name for name in json.loads((folder.root / SEAL_FILE).read_text())["files"]]
    return flip_byte(chance.choice(files), chance)


UNSEALED: dict[str, Forgery] = {
    "swapped reward": swap_rewards, "removed sample": remove_sample, "other version": change_version,
    "edited token": edit_token, "other batch order": reorder_batch, "edited segment": edit_segment,
    "edited blob": edit_blob, "edited weights": edit_weights, "replaced weights": replace_weights,
    "edited metrics": edit_metrics, "swapped checkpoints": swap_checkpoints, "removed fact": remove_fact,
    "edited text": edit_text,
}  # fmt: skip
"""Forgeries that are made with the seal removed: digests and checksums alone must find them."""


def forge(folder: RunFolder, seed: int) -> tuple[str, str]:
    """Forge a run by this seed; return the kind and what was changed."""
    chance = random.Random(seed)
    kinds = [*UNSEALED, "edited sealed file"]
    kind = kinds[seed % len(kinds)]
    if kind in UNSEALED:
        (folder.root / SEAL_FILE).unlink()
        return kind, UNSEALED[kind](folder, chance)
    return kind, edit_sealed(folder, chance)
