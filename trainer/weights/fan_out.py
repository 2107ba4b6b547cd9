"""Decides which node fetches a payload from which, so that the trainer's uplink carries a constant number of copies.

There is one tree per payload, without sockets and clock. Failed nodes are reported by the callers.

Nodes get increasing tickets as they join, and a node's parent always has a lower ticket. There can be no cycle,
whichever node fails or is moved. A node fetches from the node with the lowest ticket that has capacity, so the tree is
about as shallow as its width allows. If no node has capacity (after failures), the root accepts a node beyond its
width.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOT = ""
"""Name of the root, the trainer."""
NOBODY = "\0"
"""Parent of a node whose parent left; no process can have this name."""


@dataclass
class _Node:
    ticket: int
    address: str
    parent: str = ROOT
    is_failed: bool = False
    """A child lost it as a parent: it gets no further children, even if it still runs."""


class FanOutTree:
    """The tree of one payload; `width`: number of children of each node, including the root."""

    def __init__(self, root_address: str, width: int) -> None:
        assert width >= 1, "a tree needs branches"
        self._width = width
        self._nodes: dict[str, _Node] = {ROOT: _Node(0, root_address)}
        self._num_tickets = 0
        self.num_moved = 0
        """Number of nodes that lost their parent and got another one."""
        self.max_root_children = 0

    def join(self, name: str, address: str) -> str:
        """Add a node (again, if its process restarted); returns its parent's address."""
        assert name != ROOT, "the root has no parent"
        self.leave(name)
        self._num_tickets += 1
        node = self._nodes[name] = _Node(self._num_tickets, address)
        return self._place(name, node)

    def replace(self, name: str, address: str, lost: str) -> str:
        """Return another parent's address for a node whose parent at address `lost` failed."""
        node = self._nodes.get(name)
        if node is None or node.address != address:
            return self.join(name, address)
        for other_name, other in self._nodes.items():
            if other.address == lost and other_name != ROOT:
                other.is_failed = True
        self.num_moved += 1
        return self._place(name, node)

    def leave(self, name: str) -> None:
        """Remove a node; its children request another parent when they notice."""
        if name != ROOT and self._nodes.pop(name, None) is not None:
            for node in self._nodes.values():
                if node.parent == name:
                    node.parent = NOBODY

    def children(self, name: str) -> list[str]:
        """Return the nodes that fetch from this node now."""
        return [child for child, node in self._nodes.items() if child != ROOT and node.parent == name]

    def parent_of(self, name: str) -> str | None:
        """Return the name of the node's parent (`ROOT`: the trainer); None if the node or its parent is unknown."""
        node = self._nodes.get(name)
        return node.parent if node is not None and node.parent in self._nodes else None

    def _place(self, name: str, node: _Node) -> str:
        node.parent = name  # its previous slot is free during the search
        order = sorted(self._nodes.items(), key=lambda item: item[1].ticket)
        for parent, candidate in order:
            is_fit = candidate.ticket < node.ticket and not candidate.is_failed
            if is_fit and len(self.children(parent)) < self._width:
                break
        else:
            parent = ROOT
        node.parent = parent
        self.max_root_children = max(self.max_root_children, len(self.children(ROOT)))
        return self._nodes[parent].address
