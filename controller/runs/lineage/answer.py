"""What `areal-like lineage` answers: what something came from and went into, with facts, and the gaps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.runs.lineage.graph import KINDS, Graph, Node, name_of, walk


@dataclass
class Answer:
    """Lineage of some nodes. Edges lead from what was used to what was made of it."""

    graph: Graph
    subjects: list[Node]
    came_from: set[Node] = field(default_factory=set)
    went_into: set[Node] = field(default_factory=set)
    edges: set[tuple[Node, Node]] = field(default_factory=set)
    unused: dict[int, str] = field(default_factory=dict)
    """Why no step used a group of the subject's rows or samples, by group."""
    notes: list[str] = field(default_factory=list)

    def of_kind(self, kind: str, nodes: set[Node]) -> list[Node]:
        """The nodes of a kind in order."""
        return sorted((one for one in nodes if one.kind == kind), key=lambda one: _order(self.graph, one))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; every node has `id`, `kind`, `name` and facts."""
        nodes = {*self.subjects, *self.came_from, *self.went_into}
        ordered = [one for kind in KINDS for one in self.of_kind(kind, nodes)]
        place = {one: number for number, one in enumerate(ordered)}

        def ids(some: Sequence[Node] | set[Node]) -> list[int]:
            return sorted(place[one] for one in some)

        return {
            "run": str(self.graph.folder.root), "subjects": ids(self.subjects),
            "came_from": ids(self.came_from), "went_into": ids(self.went_into),
            "nodes": [
                {"id": number, "kind": one.kind, "name": name_of(self.graph, one), **facts(self.graph, one)}
                for number, one in enumerate(ordered)
            ],
            "edges": sorted([place[first], place[last]] for first, last in self.edges),
            "unused_groups": {str(group): why for group, why in self.unused.items()}, "notes": self.notes,
        }  # fmt: skip


def answer(graph: Graph, subjects: list[Node]) -> Answer:
    """Find both directions of some nodes, which are of one kind."""
    found = Answer(graph, subjects)
    found.came_from, backwards = walk(subjects, graph.parents)
    found.went_into, forwards = walk(subjects, graph.children)
    found.edges = {(first, last) for last, first in backwards} | forwards
    groups: set[int] = set()
    for node in subjects:
        key: Any = node.key
        groups |= set(graph.groups_of_row(key)) if node.kind == "row" else set()
        groups |= {key.group} if node.kind == "sample" else set()
    for group in sorted(groups):
        _, fate, reason, detail = graph.groups[group]
        if not graph.chain.steps_of_group(group):
            words = reason or {"filtered": "all of its rewards are equal"}.get(fate, "no step has used it yet")
            found.unused[group] = f"{fate}: {words}{f' ({detail})' if detail else ''}"
    if any(node.kind == "version" and node.key.step == 0 for node in found.came_from):  # type: ignore[attr-defined]
        start = [key for key in graph.rows.others.values() if key == "warm_start.data"]
        found.notes += ["version 0 was also trained on warm_start.data"] if start else []
    if graph.rows.why_unknown:
        found.notes.append(f"rows cannot be identified: {graph.rows.why_unknown}")
    whys = {graph.rows.originals(str(one.key))[1] for one in (*subjects, *found.came_from) if one.kind == "row"}
    found.notes += sorted(why for why in whys if why)
    return found


def facts(graph: Graph, node: Node) -> dict[str, Any]:
    """What is known of a node."""
    key: Any = node.key
    if node.kind in ("source", "file"):
        described = graph.rows.file_of(f"{key[0]}:1")[1] if node.kind == "file" else {}
        made = described.get("set")
        stages = (
            {name: made[name] for name in ("manifest", "sha256", "stages", "rows_in", "rows_out")} if made else None
        )
        size = described.get("bytes") if described.get("sha256") == key[1] else None  # another part of a growing file
        return {"sha256": key[1] or None, "path": described.get("path"), "bytes": size, "set": stages}
    if node.kind == "original":
        return {"file": key[1], "sha256": key[2] or None}
    if node.kind == "row":
        return {"groups": graph.groups_of_row(key), "before": graph.rows.originals(key)[0]}
    if node.kind == "sample":
        for index, first, last, verdict, value, is_kept, worker in graph.samples.get(key.group, ()):
            if index == key.sample:
                return {
                    "group": key.group, "sample": index, "draw": graph.groups[key.group][0],
                    "fate": graph.groups[key.group][1], "versions": [first, last], "verdict": verdict, "reward": value,
                    "is_kept": bool(is_kept), "worker": worker,
                }  # fmt: skip
        return {"group": key.group, "sample": key.sample}
    if node.kind in ("batch", "version"):
        is_replay = key in graph.chain.batches and graph.chain.batches[key].is_replay
        return {
            "step": key.step, "lineage": key.lineage, "is_replay": is_replay,
            "is_replaced": graph.chain.is_replaced(key),
        }  # fmt: skip
    model = graph.models[key]
    return {
        "path": model.path, "version": model.version.step, "lineage": model.version.lineage,
        "is_stored": model.is_stored, "checkpoint_sha256": model.digest or None, "repository": model.repository or None,
    }  # fmt: skip


def gaps(graph: Graph) -> list[str]:
    """Links that are missing in a run, one line each; empty if every sample, batch, version and model has its own."""
    found = [f"rows cannot be identified: {graph.rows.why_unknown}"] if graph.rows.why_unknown else []
    if not graph.rows.has_record:
        found.append(
            "the hashes of the run's files were not recorded, because the run was started by an earlier version of "
            "areal_like"
        )
    files = {graph.rows.file_of(where)[0]: graph.rows.file_of(where)[1] for where in graph.used_rows()}
    found += [
        f"the hash of {name} was not recorded"
        for name, described in sorted(files.items(), key=lambda item: item[0])
        if name and graph.rows.has_record and not described.get("sha256") and not graph.rows.is_made(name)
    ]
    for version, batch in graph.chain.batches.items():
        missing = [one for one in (*batch.members, *batch.reused) if not graph.has_sample(one)]
        found += [
            f"step {version.step} has sample {one.group}.{one.sample}, which is not in the ledger" for one in missing
        ]
        if version.step > 1 and graph.chain.before(version).step != version.step - 1:
            found.append(f"step {version.step} of lineage {version.lineage}: the previous version is not recorded")
    found += [
        f"group {group} was consumed, but no step has used it"
        for group, (_, fate, _, _) in graph.groups.items()
        if fate == "consumed" and not graph.chain.steps_of_group(group)
    ]
    for path, model in graph.models.items():
        if model.version.step > 0 and model.version not in graph.chain.batches:
            found.append(f"version {model.version.step} of {path} is not recorded")
        if model.kind == "export" and not any(one.kind == "checkpoint" for one in graph.parents(Node("export", path))):
            found.append(f"the checkpoint of {path} is not recorded")
    return found


def _order(graph: Graph, node: Node) -> Any:
    key: Any = node.key
    if node.kind in ("checkpoint", "export"):
        return graph.models[key].version.step, str(key)
    if node.kind == "row":
        name, number = graph.rows.split(key)
        return name, number
    return tuple(str(part) if part is None else part for part in key)
