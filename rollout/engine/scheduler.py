"""Admission of waiting answers to free rows, and reuse of prompts that are in the cache."""

from __future__ import annotations

from collections import deque

import numpy as np

from rollout.engine.slots import Answer


class Scheduler:
    """First in, first out.

    While more answers wait than rows are free, admission waits until a sixteenth of the rows is free: a prefill costs
    about as much as a decode step even with few prompts, and a free row costs little in the meantime. The worker bounds
    the queue, because it takes no more samples than its capacity.
    """

    def __init__(self, num_slots: int) -> None:
        self._queue: deque[Answer] = deque()
        self._admission_rows = max(1, num_slots // 16)
        self._owners: dict[tuple[int, int], list[Answer]] = {}
        """By share key and adapter: another adapter has other keys and values of the same prompt."""

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
        """Remove an answer from the queue; None if it is not there."""
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

    def prompt_owner(self, answer: Answer) -> Answer | None:
        """A running answer whose row contains this one's prompt under the current weights."""
        for other in self._owners.get(_key(answer), ()):
            if np.array_equal(other.request.prompt_P, answer.request.prompt_P):
                return other
        return None

    def share_prompt(self, answer: Answer) -> None:
        """Register that this answer's row contains its prompt, which can be copied."""
        if answer.request.share_key >= 0:
            self._owners.setdefault(_key(answer), []).append(answer)

    def unshare_prompt(self, answer: Answer) -> None:
        """Unregister this answer's row, which is free now."""
        owners = self._owners.get(_key(answer), [])
        if answer in owners:
            owners.remove(answer)
            if not owners:
                del self._owners[_key(answer)]

    def unshare_all(self) -> None:
        """Unregister all rows: none has keys and values of the current weights only."""
        self._owners.clear()


def _key(answer: Answer) -> tuple[int, int]:
    return answer.request.share_key, answer.adapter
