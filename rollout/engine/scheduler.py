"""Who gets a free row, and whose prompt need not be computed again.

Owns: the queue, when to admit, which running answer can lend its prompt. Refuses: rows, tensors, time.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from rollout.engine.slots import Answer


class Scheduler:
    """First in, first out.

    While more answers wait than rows are free, admission waits until a sixteenth of the rows is free: a prefill costs
    about as much as a decode step however few prompts it has, and a free row costs little in the meantime. The bound on
    the queue is the worker's (it leases no more samples than it may hold).
    """

    def __init__(self, num_slots: int) -> None:
        self._queue: deque[Answer] = deque()
        self._admission_rows = max(1, num_slots // 16)
        self._lenders: dict[int, list[Answer]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, answer: Answer) -> None:
        """Queue an answer."""
        self._queue.append(answer)

    def take(self, num_free: int) -> list[Answer]:
        """The answers to admit now, oldest first."""
        if num_free < min(len(self._queue), self._admission_rows):
            return []
        return [self._queue.popleft() for _ in range(min(num_free, len(self._queue)))]

    def remove(self, ticket: int) -> Answer | None:
        """Take an answer out of the queue; None when it is not there."""
        for answer in self._queue:
            if answer.ticket == ticket:
                self._queue.remove(answer)
                return answer
        return None

    def drain(self) -> list[Answer]:
        """Empty the queue."""
        waiting = list(self._queue)
        self._queue.clear()
        return waiting

    # ------------------------------------------------------------------ prompts of a group

    def lender(self, answer: Answer) -> Answer | None:
        """A running answer whose row holds this one's prompt under the present weights."""
        for other in self._lenders.get(answer.request.share_key, ()):
            if np.array_equal(other.request.prompt_P, answer.request.prompt_P):
                return other
        return None

    def lend(self, answer: Answer) -> None:
        """From now on this answer's row can lend its prompt."""
        if answer.request.share_key >= 0:
            self._lenders.setdefault(answer.request.share_key, []).append(answer)

    def recall(self, answer: Answer) -> None:
        """This answer's row is free; it lends nothing any more."""
        lenders = self._lenders.get(answer.request.share_key, [])
        if answer in lenders:
            lenders.remove(answer)
            if not lenders:
                del self._lenders[answer.request.share_key]

    def recall_all(self) -> None:
        """No row holds keys and values of the present weights alone."""
        self._lenders.clear()
