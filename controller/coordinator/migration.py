"""Decides which running samples move from a loaded worker to an idle one, when, and how many at once.

A move is a recall (SendRecall), answered like a lease returned by a worker that drains (sample_intake.py), and leased
again by leasing.py. So a sample has one worker at a time.

After Llumnix (arXiv 2406.03243), which moves KV caches between instances; here only the tokens move, and prompt and
partial answer are prefilled again, which costs a fraction of decoding them.

A wave is made at most every EVERY_S, when all possible leases are made and some worker still has an idle slot. It
consists of moves from the worker with the longest wait to the one with the shortest, as long as the longest wait
decreases by `min_gain_s`. The next wave waits for the answers to this one, at most RECALL_S: a worker may keep an
answer that is nearly finished.
"""

from __future__ import annotations

from controller.coordinator.effects import SendRecall
from controller.coordinator.routing import Router
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.worker import Lease, Worker

EVERY_S = 1.0
RECALL_S = 10.0
MAX_MOVES = 2
"""Maximum moves of a sample, because the estimate may stay wrong about it."""
PREFILL_SHARE = 0.1
"""Cost of prefilling a token relative to decoding one. A sample is only moved if its remaining decoding costs more than
its prefill.
"""


def advance(state: RunState) -> None:
    """Recall samples that should move, if a wave is due."""
    routing = state.routing
    settings = state.settings
    if not settings.migration or state.phase is not Phase.RUNNING or state.now_s < routing.next_migration_s:
        return
    routing.next_migration_s = state.now_s + EVERY_S
    _forget_late(state)
    # One wave at a time: until its answers arrive, the recorded loads are not up to date.
    if not routing.recalls and len(state.workers) > 1:
        _wave(state)


def _forget_late(state: RunState) -> None:
    for lease_id, due_s in list(state.routing.recalls.items()):
        if state.now_s >= due_s:
            del state.routing.recalls[lease_id]


def _wave(state: RunState) -> None:
    router = Router(state)
    sources = [_Outlook(state, worker) for worker in router.workers if worker.speed > 0]
    targets = [one for one in sources if one.num_idle > 0 and not router.is_behind(one.worker)]
    recalled: dict[str, list[int]] = {}
    while sources:
        source = max(sources, key=lambda one: one.wait_s)
        others = [one for one in targets if one is not source and one.num_idle > 0]
        target = min(others, key=lambda one: one.wait_s, default=None)
        if target is None or source.wait_s - target.wait_s < state.settings.min_gain_s:
            break
        lease = _choose(state, source, target)
        if lease is None:
            sources.remove(source)
            continue
        source.give(lease)
        target.receive(lease)
        _recall(state, lease, target.worker)
        recalled.setdefault(source.worker.name, []).append(lease.lease_id)
    for name, lease_ids in recalled.items():
        state.emit(SendRecall(worker=name, lease_ids=tuple(lease_ids)))


class _Outlook:
    """Planned work of a worker in a wave: all tokens at full speed, no answer faster than its speed alone."""

    def __init__(self, state: RunState, worker: Worker) -> None:
        self.worker = worker
        self.leases = {lease_id: state.leases[lease_id] for lease_id in worker.outstanding}
        self.tokens = worker.load_tokens
        self.num_idle = worker.num_slots - len(self.leases)
        self._look()

    def _look(self) -> None:
        self.longest = max((lease.expected_tokens for lease in self.leases.values()), default=0.0)
        self.wait_s = self._wait_s(self.tokens, self.longest)

    def _wait_s(self, tokens: float, longest: float) -> float:
        alone_s = longest / self.worker.steps_per_s if self.worker.steps_per_s else 0.0
        return max(tokens / self.worker.speed, alone_s)

    @property
    def is_held_up(self) -> bool:
        """Whether one long answer determines the wait: only moving it would shorten the wait."""
        return bool(self.worker.steps_per_s) and self.longest / self.worker.steps_per_s >= self.wait_s

    def wait_with_s(self, lease: Lease) -> float:
        """Seconds until it is done with this sample in addition."""
        return self._wait_s(self.tokens + lease.expected_tokens, max(self.longest, lease.expected_tokens))

    def give(self, lease: Lease) -> None:
        del self.leases[lease.lease_id]
        self.tokens -= lease.expected_tokens
        self._look()

    def receive(self, lease: Lease) -> None:
        self.leases[lease.lease_id] = lease
        self.tokens += lease.expected_tokens
        self.num_idle -= 1
        self._look()


def _choose(state: RunState, source: _Outlook, target: _Outlook) -> Lease | None:
    """The sample that `source` should give: of all samples that `target` would finish in time, the one with the fewest
    tokens to prefill. If one long answer determines the wait of `source`, only that one.
    """
    movable = [lease for lease in source.leases.values() if _is_movable(state, lease, target.worker)]
    if source.is_held_up:
        movable = [lease for lease in movable if lease.expected_tokens >= source.longest]
    latest_s = source.wait_s - state.settings.min_gain_s
    in_time = (lease for lease in movable if target.wait_with_s(lease) <= latest_s)
    return min(in_time, key=lambda lease: (_num_tokens(state, lease), -lease.expected_tokens), default=None)


def _num_tokens(state: RunState, lease: Lease) -> int:
    return state.groups.table.live[lease.group_id].samples[lease.sample_index].num_tokens


def _is_movable(state: RunState, lease: Lease, target: Worker) -> bool:
    """Return whether the sample is a training sample that has not moved too often, has more decoding left than its
    prefill costs, and may be continued by `target`.
    """
    if lease.purpose != "train" or lease.is_recalled:
        return False
    group = state.groups.table.live[lease.group_id]
    sample = group.samples[lease.sample_index]
    is_allowed = sample.num_moves < MAX_MOVES and group.min_version(sample) <= target.weights.version
    return is_allowed and lease.expected_tokens > PREFILL_SHARE * sample.num_tokens


def _recall(state: RunState, lease: Lease, target: Worker) -> None:
    lease.is_recalled = True
    state.groups.table.live[lease.group_id].samples[lease.sample_index].moving_to = target.name
    state.routing.recalls[lease.lease_id] = state.now_s + RECALL_S
