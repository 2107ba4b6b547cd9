"""How many examples the tests try that go through random schedules or long tables, as property tests do."""

from __future__ import annotations

from hypothesis import settings

FULL = 100
"""Examples of a property test that names no number, in CI and `make test-all`."""


def num_examples(count: int) -> int:
    """Return `count` in CI and `make test-all`, and a quarter of it in `make test` and `make test-fast`.

    That is the share of Hypothesis' profile in use (docs/decisions/0119-two-suites.md).
    """
    return max(1, count * settings.default.max_examples // FULL)
