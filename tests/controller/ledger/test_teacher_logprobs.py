"""Log-probs of a teacher in the ledger: stored with a sample, there after a restart, absent where there are none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from ledger_entries import admit, finished, lineage, partial, shipped
from real_ledger import trajectory_of

from areal_like.trajectory import Trajectory
from areal_like.wire.encoding import decode, encode
from areal_like.wire.messages import Batch
from controller.ledger.audit import audit
from controller.ledger.ledger import Ledger
from controller.ledger.segment_store import pack_sample, unpack_sample
from controller.ledger.trajectory_cache import _size


def taught(versions: list[int], *logprobs: float) -> Trajectory:
    """Three given tokens, then a token of each version."""
    found = np.array([0.0, 0.0, 0.0, *logprobs], np.float32)
    return msgspec.structs.replace(trajectory_of(versions), teacher_logprobs_T=found)


def bits(trajectory: Trajectory) -> list[int]:
    assert trajectory.teacher_logprobs_T is not None
    return trajectory.teacher_logprobs_T.view(np.int32).tolist()


SAMPLE = (taught([0, 0], -1.25, -np.inf), trajectory_of([0]), taught([1], np.nan))


def test_they_come_back_bit_by_bit_with_each_trajectory() -> None:
    found, _ = unpack_sample(pack_sample(SAMPLE, "text"))
    assert bits(found[0]) == bits(SAMPLE[0])
    assert found[1].teacher_logprobs_T is None
    assert bits(found[2]) == bits(SAMPLE[2])


def test_a_sample_without_a_teacher_stores_an_empty_field_and_older_records_are_read() -> None:
    fields = msgspec.msgpack.decode(pack_sample((trajectory_of([0, 0]),), "text"))
    assert fields[-1] == b""
    with_teacher = msgspec.msgpack.decode(pack_sample((taught([0, 0], -1.0, -2.0),), "text"))
    assert len(with_teacher[-1]) == 4 * 5
    older = msgspec.msgpack.encode(fields[:-1])
    (found,), text = unpack_sample(older)
    assert (found.teacher_logprobs_T, found.num_sampled, text) == (None, 2, "text")


def test_a_record_with_too_few_of_them_is_refused() -> None:
    fields = msgspec.msgpack.decode(pack_sample((taught([0, 0], -1.0, -2.0),), "text"))
    with pytest.raises(ValueError, match="teacher_logprobs_T has 4 entries, expected 5"):
        unpack_sample(msgspec.msgpack.encode([*fields[:-1], fields[-1][4:]]))


def test_they_count_in_the_memory_of_kept_samples() -> None:
    assert _size(SAMPLE[0]) - _size(trajectory_of([0, 0])) == 4 * 5


@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_batch_has_them_also_after_a_restart_of_the_controller(tmp_path: Path, is_reopened: bool) -> None:
    """From the cache, and read from disk; after tokens that another worker had reported."""
    entry = msgspec.structs.replace(finished(0, [0, 0]), trajectories=SAMPLE[:1])
    ledger = Ledger(tmp_path, run_id="r")
    ledger.apply([lineage(), admit(0), partial(0, 0, [0])])
    ledger.apply([entry, shipped(1, 0)])
    groups = ledger.load().batches[0].groups
    if is_reopened:
        ledger.close()
        ledger = Ledger(tmp_path, must_exist=True)
    with ledger:
        samples = ledger.batch_samples(groups)
    sent = decode(encode(Batch(step=1, lineage="l0", samples=samples)), frozenset({Batch}))
    assert isinstance(sent, Batch)
    (found,) = sent.samples
    assert bits(found.trajectory) == bits(SAMPLE[0])
    assert audit(tmp_path).findings == ()
