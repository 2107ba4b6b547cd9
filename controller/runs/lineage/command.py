"""`areal-like lineage`: finds what was named, and prints where it came from and what it went into."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from controller.ledger.read_only import check_schema, open_ledger
from controller.run_folder.formatting import printable
from controller.run_folder.run_folder import RunFolder
from controller.runs.lineage.answer import Answer, answer, gaps
from controller.runs.lineage.chain import Member, Version
from controller.runs.lineage.erasing import erase, plan, words
from controller.runs.lineage.graph import Graph, Node
from controller.runs.lineage.models import checkpoint_model, export_model
from controller.runs.lineage.picture import picture
from controller.runs.lineage.text import lines
from controller.runs.verify.damaged import DAMAGED
from controller.runs.verify.target import Target, find_target

MAX_GAPS = 20


def lineage_command(arguments: argparse.Namespace) -> int:
    """Print lineage; return the exit status, 1 if links of a whole run are missing. Raises UserError."""
    target = find_target(arguments.source, arguments.run)
    folder = target.run
    if not folder.ledger.is_file():
        raise UserError(
            "the run has no ledger, because nothing has been trained yet or because it trains from files",
            where=str(folder.root),
            remedy="wait until the run has trained a step, or specify a run that was started with `areal-like train`",
        )
    graph = open_graph(folder)
    found = answer(graph, subjects(graph, target, arguments))
    if arguments.erase:
        return _erase(found, arguments)
    is_whole = target.version is None and not any(
        getattr(arguments, name) is not None for name in ("row", "sample", "batch", "version")
    )
    missing = gaps(graph) if is_whole else None
    _show(found, missing, arguments)
    return int(bool(missing))


def _erase(found: Answer, arguments: argparse.Namespace) -> int:
    """Erase a row, or show what that would do."""
    if arguments.row is None:
        raise UserError("no row is specified", where="--erase", remedy="add --row FILE:LINE or --row COLUMN=VALUE")
    made = plan(found)
    num_samples = erase(made, found.graph.folder) if arguments.yes else None
    if arguments.json:
        print(json.dumps({"run": str(found.graph.folder.root), "erased_samples": num_samples, **made.as_dict()}))
        return 0
    for line in words(made, num_samples):
        print(printable(line))
    return 0


def open_graph(folder: RunFolder) -> Graph:
    """The graph of a run. Raises UserError."""
    try:
        db, _ = open_ledger(folder)
        with contextlib.closing(db):
            check_schema(db, folder)
            db.execute("BEGIN")  # one consistent view, also of a run in progress
            return Graph(db, folder)
    except DAMAGED as error:
        if isinstance(error, UserError):
            raise
        remedy = "run areal-like verify to see what is damaged"
        raise UserError(f"the file cannot be read ({error})", where=str(folder.ledger), remedy=remedy) from error


def subjects(graph: Graph, target: Target, arguments: argparse.Namespace) -> list[Node]:
    """The nodes that a command names. Raises UserError."""
    if arguments.row is not None:
        return [Node("row", where) for where in graph.rows.find(arguments.row)]
    if arguments.sample is not None:
        return _sample(graph, *arguments.sample)
    if arguments.batch is not None or arguments.version is not None:
        step = arguments.batch if arguments.batch is not None else arguments.version
        kind = "batch" if arguments.batch is not None else "version"
        found = [one for one in graph.chain.batches if one.step == step]
        found += [Version(0, "")] if (step, kind) == (0, "version") else []
        if not found:
            remedy = (
                f"the ledger has steps 1 to {graph.chain.last_step}" if graph.chain.last_step else "try again later"
            )
            raise UserError(f"the run has no {kind} {step}", where=graph.folder.name, remedy=remedy)
        return [Node(kind, one) for one in found]
    if target.checkpoint is not None or target.export is not None:
        return [_model(graph, target)]
    last = graph.chain.version(graph.chain.last_step)
    assert last is not None
    return [Node("version", last)]


def _sample(graph: Graph, group: int, index: int | None) -> list[Node]:
    if group not in graph.groups:
        remedy = f"groups are numbered from 0 to {max(graph.groups)}" if graph.groups else "no group has been drawn yet"
        raise UserError(f"there is no group {group}", where=graph.folder.name, remedy=remedy)
    there = [one[0] for one in graph.samples.get(group, ())]
    if index is None and there:
        return [Node("sample", Member(group, one)) for one in there]
    if index is None or index not in there:
        remedy = f"its samples are {', '.join(map(str, there))}" if there else "none of its samples has finished"
        named = f"group {group} has no sample" + ("" if index is None else f" {index}")
        raise UserError(named, where=graph.folder.name, remedy=remedy)
    return [Node("sample", Member(group, index))]


def _model(graph: Graph, target: Target) -> Node:
    """The checkpoint or exported model that a command names, which may be a copy."""
    path = target.checkpoint or target.export
    assert path is not None
    if str(path) not in graph.models:
        run_id = graph.folder.read_state().get("run_id", "")
        is_checkpoint = target.checkpoint is not None
        model = checkpoint_model(path, graph.chain) if is_checkpoint else export_model(path, graph.chain, run_id)
        if model is None:
            what = f"the folder is not a {'checkpoint' if is_checkpoint else 'model'} of {graph.folder.root}"
            raise UserError(what, where=str(path), remedy="specify the run that this folder belongs to with --run RUN")
        graph.models[str(path)] = model
    return Node("checkpoint" if target.checkpoint is not None else "export", str(path))


def _show(found: Answer, missing: list[str] | None, arguments: argparse.Namespace) -> None:
    if arguments.svg:
        try:
            Path(arguments.svg).write_text(picture(found), encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            remedy = "choose a different file with --svg FILE"
            raise UserError(
                f"the file cannot be written ({error.strerror})", where=arguments.svg, remedy=remedy
            ) from error
    if arguments.json:
        page: dict[str, Any] = found.as_dict()
        print(json.dumps(page if missing is None else {**page, "gaps": missing}, ensure_ascii=False))
        return
    for line in lines(found):
        print(printable(line))
    if missing is not None:
        print(printable(_summary(found.graph, missing)))
    if arguments.svg:
        print(f"picture: {arguments.svg}")


def _summary(graph: Graph, missing: list[str]) -> str:
    num_samples = sum(len(one) for one in graph.samples.values())
    counts = (
        f"{num_samples:,} samples of {len(graph.groups):,} groups, {len(graph.used_rows()):,} rows, "
        f"{len(graph.chain.batches):,} batches, {len(graph.models):,} checkpoints and exported models"
    )
    if not missing:
        return f"complete: {counts}, each with its links in both directions"
    shown = [f"  {line}" for line in missing[:MAX_GAPS]]
    more = [f"  and {len(missing) - MAX_GAPS:,} more"] if len(missing) > MAX_GAPS else []
    return "\n".join([f"incomplete: {counts}; {len(missing):,} links are missing", *shown, *more])
