"""The cache of exact duplicates: what a key depends on, what is kept, and how much of it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from areal_like.wire.messages import ScoreRequest
from services.reward.cache import ScoreCache
from services.reward.job import Outcome

REQUEST = ScoreRequest(
    request_id="a", scorer="", row={"answer": "4"}, response="4", finish_reason="stop", num_tokens=3, deadline_s=9.0
)


def key(cache: ScoreCache | None = None, **changes: Any) -> bytes | None:
    return (ScoreCache(1 << 20, "math@1", ()) if cache is None else cache).key_of(
        msgspec.structs.replace(REQUEST, **changes)
    )


def outcome(value: float = 1.0, **more: Any) -> Outcome:
    return Outcome(job_id=1, kind="scored", value=value, **more)


@pytest.mark.parametrize(
    "change",
    [{"response": "5"}, {"row": {"answer": "5"}}, {"finish_reason": "length"}, {"num_tokens": 4}, {"scorer": "math"}],
)
def test_whatever_a_scorer_sees_is_part_of_the_key(change: dict[str, Any]) -> None:
    assert key(**change) != key()


def test_who_asks_and_how_long_it_may_take_is_no_part_of_the_key() -> None:
    assert key(request_id="b", deadline_s=1.0, arrow="x") == key()


def test_another_version_of_a_scorer_has_other_keys() -> None:
    assert key(ScoreCache(1 << 20, "math@2", ())) != key()


def test_a_scorer_that_is_not_deterministic_keeps_its_sum_out_but_not_the_others() -> None:
    cache = ScoreCache(1 << 20, "math@1+judge@1", {"judge"})
    assert key(cache) is None
    assert key(cache, scorer="judge") is None
    assert key(cache, scorer="math") is not None
    assert key(ScoreCache(0, "math@1", ())) is None, "cache_mb: 0 switches it off"


def test_the_least_recently_used_goes_first_and_the_bytes_stay_within_the_bound() -> None:
    cache = ScoreCache(10_000, "v", ())
    keys = [bytes([number]) * 16 for number in range(100)]
    for place, one in enumerate(keys):
        cache.keep(one, outcome(float(place)))
        assert cache.find(keys[0]) is not None, "it is used all the time"
        assert cache.num_bytes <= 10_000
    assert cache.find(keys[1]) is None
    assert cache.find(keys[-1]) is not None
    assert len(cache) == 16


def test_what_is_no_score_or_larger_than_the_cache_is_not_kept() -> None:
    cache = ScoreCache(2_000, "v", ())
    cache.keep(b"a" * 16, Outcome(job_id=1, kind="crashed"))
    cache.keep(b"b" * 16, outcome(reason="x" * 1_000))
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_the_counted_bytes_are_no_less_than_what_python_takes() -> None:
    cache = ScoreCache(1 << 30, "v", ())
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(2_000):
        names = {f"part{number}": 1.0 * number, "correct": 1.0}
        found = outcome(0.5 + number, components=names, scorer_s={"math": 0.1 + number}, reason=f"reason {number}")
        cache.keep(number.to_bytes(16, "big"), msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Outcome))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * cache.num_bytes < after - before <= cache.num_bytes


def test_hits_misses_and_what_is_held_are_counted() -> None:
    cache = ScoreCache(2_000, "v", ())
    assert cache.find(b"a" * 16) is None
    cache.keep(b"a" * 16, outcome(1.0))
    assert [cache.find(key) is not None for key in (b"a" * 16, b"a" * 16, b"b" * 16)] == [True, True, False]
    held = cache.num_bytes
    assert held > 0
    assert cache.counters() == {"cache.hits": 2, "cache.misses": 2, "cache.entries": 1, "cache.bytes": held}
    cache.keep(b"a" * 16, outcome(2.0))
    assert (len(cache), cache.num_bytes, cache.find(b"a" * 16)) == (1, held, outcome(1.0)), "a score is kept once"


def test_score_that_just_fills_the_cache_is_kept() -> None:
    probe = ScoreCache(1 << 20, "v", ())
    probe.keep(b"a" * 16, outcome(1.0))
    for room, is_kept in ((probe.num_bytes, True), (probe.num_bytes - 1, False)):
        cache = ScoreCache(room, "v", ())
        cache.keep(b"a" * 16, outcome(1.0))
        assert (cache.find(b"a" * 16) is not None) is is_kept


@pytest.mark.parametrize("name", ["components", "scorer_s", "reason"])
def test_every_text_of_an_outcome_counts_towards_the_bound(name: str) -> None:
    def num_bytes(text: str) -> int:
        cache = ScoreCache(1 << 20, "v", ())
        cache.keep(b"key", outcome(**{name: text if name == "reason" else {text: 1.0}}))
        return cache.num_bytes

    assert num_bytes("x" * 101) - num_bytes("x") >= 4 * 100, "a character may take four bytes"
