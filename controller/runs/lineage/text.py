"""The answer of `areal-like lineage` as text."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from controller.runs.lineage.answer import Answer, facts
from controller.runs.lineage.graph import KINDS, Graph, Node, name_of

MAX_SHOWN = 8
"""Number of nodes of one kind that are named; ranges of steps are always complete."""
_TITLES = {
    "source": "made from", "original": "original", "file": "file", "row": "row", "sample": "samples", "batch": "steps",
    "version": "versions", "checkpoint": "checkpoints", "export": "exports",
}  # fmt: skip


def lines(found: Answer) -> Iterator[str]:
    """The lines. Versions, checkpoints and exported models are always all named."""
    graph = found.graph
    names = [f"{node.kind} {name_of(graph, node)}" for node in found.subjects[:MAX_SHOWN]]
    more = len(found.subjects) - MAX_SHOWN
    names = [name.replace("version version", "version").replace("batch step", "step") for name in names]
    yield f"{', '.join(names)}{f' and {more} more' if more > 0 else ''} of {graph.folder.root}"
    yield from (f"  {line}" for node in found.subjects[:1] for line in _details(graph, node))
    for title, nodes in (("came from", found.came_from), ("went into", found.went_into)):
        yield title
        shown = [line for kind in KINDS for line in _kind(graph, kind, found.of_kind(kind, nodes))]
        yield from (f"  {line}" for line in shown or ["nothing"])
    for why, groups in itertools.groupby(sorted(found.unused, key=lambda one: found.unused[one]), found.unused.get):
        yield f"not trained on  {_some([f'group {group}' for group in groups])} ({why})"
    yield from (f"note: {note}" for note in found.notes)


def _kind(graph: Graph, kind: str, nodes: list[Node]) -> Iterator[str]:
    if not nodes:
        return
    title = f"{_TITLES[kind]:<12}"
    if kind in ("batch", "version"):
        yield f"{title} {_steps(graph, nodes)}"
    elif kind == "sample":
        members: dict[int, list[int]] = defaultdict(list)
        for node in nodes:
            key: Any = node.key
            members[key.group].append(key.sample)
        groups = [f"{group}.{ranges(sorted(indices))}" for group, indices in members.items()]
        yield f"{title} {len(nodes):,} of {len(members):,} groups: {_some(groups)}"
    elif kind in ("row", "original"):
        yield f"{title} {f'{len(nodes):,}: ' if len(nodes) > 1 else ''}{_some([name_of(graph, one) for one in nodes])}"
    else:
        for node in nodes:
            details = "; ".join(_details(graph, node))
            yield f"{title} {name_of(graph, node)}{f' ({details})' if details else ''}"


def _details(graph: Graph, node: Node) -> Iterator[str]:
    known, key = facts(graph, node), node.key
    if node.kind in ("source", "file"):
        if known["sha256"]:
            yield f"sha256 {known['sha256']}"
        if known["set"]:
            stages = [f"{one['kind']} removed {one['removed']:,}" for one in known["set"]["stages"]]
            yield f"cleaned by {', '.join(stages)}; manifest {known['set']['manifest']}"
    elif node.kind == "sample" and "verdict" in known:
        first, last = known["versions"]
        reward = "" if known["reward"] is None else f", reward {known['reward']:g}"
        yield f"sampled by version {first if first == last else f'{first} to {last}'}; {known['verdict']}{reward}"
    elif node.kind in ("checkpoint", "export"):
        model = graph.models[str(key)]
        yield f"version {model.version.step}"
        if graph.chain.is_replaced(model.version):
            yield f"of lineage {model.version.lineage}, which a restart replaced"
        yield model.state


def _steps(graph: Graph, nodes: list[Node]) -> str:
    """Steps by lineage, such as `4 to 20; replaced by a restart: 4 to 6 of lineage l0`."""
    current: list[int] = []
    replaced: dict[str, list[int]] = defaultdict(list)
    for node in nodes:
        version: Any = node.key
        (replaced[version.lineage] if graph.chain.is_replaced(version) else current).append(version.step)
    parts = [ranges(sorted(current), " to ")] if current else []
    parts += [
        f"replaced by a restart: {ranges(sorted(steps), ' to ')} of lineage {name}" for name, steps in replaced.items()
    ]
    return "; ".join(parts)


def ranges(numbers: Iterable[int], sign: str = "-") -> str:
    """Ascending numbers as ranges: `0-3, 7`."""
    found = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        part = [number for _, number in run]
        found.append(str(part[0]) if len(part) == 1 else f"{part[0]}{sign}{part[-1]}")
    return ", ".join(found)


def _some(names: list[str]) -> str:
    more = len(names) - MAX_SHOWN
    return ", ".join(names[:MAX_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
