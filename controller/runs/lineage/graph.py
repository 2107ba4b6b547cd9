"""The graph of a run: rows, samples, batches, versions, checkpoints and exported models, with parents and children.

A node is (kind, key). Edges lead from what was used to what was made of it: `source` (a file that was cleaned),
`original` (a row of it), `file`, `row`, `sample`, `batch`, `version`, `checkpoint`, `export`. A version has its batch
and the version before it as parents, so a walk finds everything that it was trained on.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from areal_like.encryption.texts import Texts
from controller.ledger.schema import has_column
from controller.run_folder.run_folder import RunFolder
from controller.runs.lineage.chain import Chain, Member, Version
from controller.runs.lineage.models import Model, models_of
from controller.runs.lineage.rows import RunRows

KINDS = ("source", "original", "file", "row", "sample", "batch", "version", "checkpoint", "export")
"""In the order of the pipeline."""


class Node(NamedTuple):
    """A node. key: a location, Member, Version or path, by kind."""

    kind: str
    key: Hashable


class Graph:
    """Parents and children of every node of a run. db: a read-only connection, used by the constructor only."""

    def __init__(self, db: sqlite3.Connection, folder: RunFolder) -> None:
        self.folder, self.chain, self.rows = folder, Chain(db), RunRows(folder)
        self.models: dict[str, Model] = models_of(db, folder, self.chain)
        draw = "COALESCE(draw, group_id)" if has_column(db, "groups", "draw") else "group_id"
        texts = Texts.to_show(folder.root)
        self.groups: dict[int, tuple[int, str, str, str]] = {
            group: (draw, fate, reason, texts.opened("detail", detail))
            for group, draw, fate, reason, detail in db.execute(
                f"SELECT group_id, {draw}, fate, reason, detail FROM groups"
            )
        }
        """Draw, fate, reason and detail by group."""
        self.samples: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        """(index, first version, last version, verdict, value, is kept, worker) by group."""
        query = "SELECT group_id, sample_index, first_version, last_version, verdict_kind, value, is_kept, worker"
        for group, *facts in db.execute(f"{query} FROM samples ORDER BY group_id, sample_index"):
            self.samples[group].append(tuple(facts))
        self._places: dict[int, str] = {}
        self._by_row: dict[str, list[int]] = defaultdict(list)
        for group in self.groups:
            self._by_row[self.place(group)].append(group)

    def place(self, group: int) -> str:
        """Location of a group's row."""
        draw = self.groups[group][0]
        if draw not in self._places:
            self._places[draw] = self.rows.place(draw)
        return self._places[draw]

    def groups_of_row(self, where: str) -> list[int]:
        """Groups that were drawn from a row."""
        return self._by_row.get(where, [])

    def used_rows(self) -> list[str]:
        """Locations of all rows that were drawn."""
        return list(self._by_row)

    def has_sample(self, member: Member) -> bool:
        """Whether the ledger has the finished sample."""
        return any(one[0] == member.sample for one in self.samples.get(member.group, ()))

    # ---------------------------------------------------------------- edges

    def parents(self, node: Node) -> list[Node]:
        """What a node was made of."""
        return list(_PARENTS[node.kind](self, node.key))

    def children(self, node: Node) -> list[Node]:
        """What was made of a node."""
        return list(_CHILDREN[node.kind](self, node.key))

    def _row_parents(self, where: Any) -> Iterator[Node]:
        name, described = self.rows.file_of(where)
        if name:
            yield Node("file", (name, described.get("sha256") or ""))
        for place in self.rows.originals(where)[0][:1]:
            yield Node("original", (place["where"], place["file"], place["sha256"] or ""))

    def _sample_children(self, member: Any) -> Iterator[Node]:
        for version in self.chain.steps_of_group(member.group):
            batch = self.chain.batches[version]
            if member in batch.members or member in batch.reused:
                yield Node("batch", version)

    def _version_parents(self, version: Any) -> Iterator[Node]:
        if version.step > 0:
            yield Node("version", self.chain.before(version))
            yield Node("batch", version)

    def _version_children(self, version: Any) -> Iterator[Node]:
        yield from (Node("version", one) for one in self.chain.after(version))
        for path, model in self.models.items():
            if model.version == version and model.kind == "checkpoint":
                yield Node("checkpoint", path)

    def _batch_parents(self, version: Any) -> Iterator[Node]:
        batch = self.chain.batches[version]
        return (Node("sample", one) for one in dict.fromkeys((*batch.members, *batch.reused)))

    def _export_parents(self, path: Any) -> Iterator[Node]:
        """Its checkpoint, or its version if the checkpoint is unknown."""
        model = self.models[path]
        found = [name for name, one in self.models.items() if one.kind == "checkpoint" and one.is_origin_of(model)]
        yield from (Node("checkpoint", name) for name in found[:1])
        if not found:
            yield Node("version", model.version)

    def _checkpoint_children(self, path: Any) -> Iterator[Node]:
        for name, model in self.models.items():
            if model.kind == "export" and Node("checkpoint", path) in self.parents(Node("export", name)):
                yield Node("export", name)


def walk(start: Iterable[Node], step: Callable[[Node], list[Node]]) -> tuple[set[Node], set[tuple[Node, Node]]]:
    """All nodes that `step` leads to from `start`, without `start`, and the steps (from, to)."""
    first = set(start)
    seen, edges, todo = set(first), set(), list(first)
    while todo:
        node = todo.pop()
        for found in step(node):
            edges.add((node, found))
            if found not in seen:
                seen.add(found)
                todo.append(found)
    return seen - first, edges


def _samples(graph: Graph, where: str) -> Iterator[Node]:
    for group in graph.groups_of_row(where):
        yield from (Node("sample", Member(group, one[0])) for one in graph.samples.get(group, ()))


_PARENTS: dict[str, Callable[[Graph, Any], Iterable[Node]]] = {
    "source": lambda graph, key: (),
    "original": lambda graph, key: (Node("source", (key[1], key[2])),),
    "file": lambda graph, key: (
        Node("source", (one["name"], one["sha256"] or "")) for one in graph.rows.made_from(key[0])
    ),
    "row": Graph._row_parents,
    "sample": lambda graph, member: (Node("row", graph.place(member.group)),),
    "batch": Graph._batch_parents,
    "version": Graph._version_parents,
    "checkpoint": lambda graph, path: (Node("version", graph.models[path].version),),
    "export": Graph._export_parents,
}
_CHILDREN: dict[str, Callable[[Graph, Any], Iterable[Node]]] = {
    "row": _samples,
    "sample": Graph._sample_children,
    "batch": lambda graph, version: (Node("version", version),),
    "version": Graph._version_children,
    "checkpoint": Graph._checkpoint_children,
    "export": lambda graph, path: (),
}


def name_of(graph: Graph, node: Node) -> str:
    """A node as a user names it."""
    key: Any = node.key
    if node.kind in ("source", "original", "file"):
        return str(key[0])
    if node.kind == "sample":
        return f"{key.group}.{key.sample}"
    if node.kind == "batch":
        return f"step {key.step}{_lineage(graph, key)}"
    if node.kind == "version":
        return f"version {key.step}{_lineage(graph, key)}"
    if node.kind in ("checkpoint", "export"):
        path = Path(str(key))
        return str(path.relative_to(graph.folder.root)) if path.is_relative_to(graph.folder.root) else str(path)
    return str(key)


def _lineage(graph: Graph, version: Version) -> str:
    return f" ({version.lineage}, replaced)" if graph.chain.is_replaced(version) else ""
