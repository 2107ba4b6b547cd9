"""The ledger of an encrypted run: no content on disk, and every change or exchange of records is found."""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from ledger_entries import admit, finished, lineage, partial, shipped

pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")

from areal_like.encryption import record_cipher
from areal_like.encryption.run_key import MARKER, encrypt_folder
from areal_like.encryption.settings import EncryptionSettings
from areal_like.encryption.texts import Texts
from areal_like.errors import LedgerError, UserError
from areal_like.verdict import Verdict
from controller.coordinator.effects import DropGroup, RecordIncident
from controller.ledger.audit import audit
from controller.ledger.ledger import Ledger, LedgerEntry
from controller.ledger.segment_store import HEADER, SegmentStore
from controller.runs.verify.chain import Chain, check_chain

CANARY = "Zebra-quartz-5519"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUN_KEY", bytes(range(32)).hex())
    root = tmp_path / "run"
    root.mkdir()
    encrypt_folder(root, EncryptionSettings(key_env="RUN_KEY"))
    return root


def fill(root: Path, segment_bytes: int = 32 << 20) -> None:
    with Ledger(root, run_id="r", segment_bytes=segment_bytes) as ledger:
        ledger.apply([lineage(), *(admit(number) for number in range(4)), partial(3, 0, [0, 0])])
        for number in (0, 1):
            failed = msgspec.structs.replace(
                finished(number, [0, 0, 0]), response_text=f"answer {CANARY}",
                verdict=Verdict(kind="scored", value=1.0, reason=f"said {CANARY}"),
            )  # fmt: skip
            ledger.apply([failed])
        ledger.apply([shipped(1, 0), LedgerEntry(effect=DropGroup(group_id=2, reason="timeout", detail=CANARY)),
                      LedgerEntry(effect=RecordIncident(kind="worker_lost", text=CANARY))])  # fmt: skip


def stored_bytes(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file())


def breaks(root: Path) -> list[str]:
    chain = Chain()
    with closing(sqlite3.connect(root / "ledger.sqlite")) as db:
        check_chain(db, root, chain)
    return chain.breaks


def test_answers_and_reasons_are_in_no_file_and_everything_is_read_again(run, tmp_path):
    fill(tmp_path)
    assert CANARY.encode() in stored_bytes(tmp_path), "the canary would be found"
    fill(run)
    assert CANARY.encode() not in stored_bytes(run)
    with Ledger(run, cache_bytes=0) as ledger:
        assert ledger.trajectories(0, 0)[0].num_sampled == 3
        assert ledger.prefix(3, 0).tokens_R.tolist() == [0, 1]
    assert audit(run).is_clean
    assert breaks(run) == []
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        facts = [msgspec.json.decode(blob) for (blob,) in db.execute("SELECT facts FROM samples")]
        (detail,) = db.execute("SELECT detail FROM groups WHERE group_id = 2").fetchone()
    texts = Texts.to_write(run)
    assert {texts.opened("reason", one["reason"]) for one in facts} == {f"said {CANARY}"}
    assert texts.opened("detail", detail) == CANARY


def test_a_changed_byte_is_found_also_where_its_checksum_was_changed_as_well(run):
    fill(run)
    (file,) = (run / "segments").glob("*.seg")
    whole = bytearray(file.read_bytes())
    start = record_cipher.HEADER.size
    magic, _, length = HEADER.unpack_from(whole, start)
    payload = whole[start + HEADER.size :][:length]
    payload[length // 2] ^= 1
    file.write_bytes(bytes(whole[:start]) + HEADER.pack(magic, zlib.crc32(payload), length) + payload
                     + bytes(whole[start + HEADER.size + length :]))  # fmt: skip
    with pytest.raises(LedgerError, match=r"000001.seg at byte 64: the record was changed"), Ledger(run) as ledger:
        ledger.prefix(3, 0)


def test_records_that_changed_places_and_files_that_changed_names_are_found(run):
    fill(run, segment_bytes=1)
    _, second, third = sorted((run / "segments").glob("*.seg"))
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    third.write_bytes(kept)
    found = breaks(run)
    assert len(found) == 2
    assert all("the record was changed, or it is from another place or file" in one for one in found)
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(LedgerError, match="truncated"):
        Ledger(run)


def test_a_segment_of_another_run_with_the_same_key_is_found(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    encrypt_folder(other, EncryptionSettings(key_env="RUN_KEY"))
    for root in (run, other):
        fill(root)
    (other / "segments" / "000001.seg").replace(run / "segments" / "000001.seg")
    assert all("encrypted with the key of another run, so it was exchanged" in one for one in breaks(run))


def test_the_ledger_is_not_opened_without_the_key_or_with_another(run, monkeypatch):
    fill(run)
    monkeypatch.setenv("RUN_KEY", bytes(range(1, 33)).hex())
    with pytest.raises(UserError, match="is not the key that the data was encrypted with"):
        Ledger(run)
    monkeypatch.delenv("RUN_KEY")
    with pytest.raises(UserError, match="environment variable RUN_KEY, which is not set"):
        Ledger(run)


def test_records_without_the_marker_of_their_run_are_named(run):
    fill(run)
    (run / MARKER).unlink()
    with Ledger(run) as ledger, pytest.raises(LedgerError, match=r"but the encryption.json of the run is missing"):
        ledger.prefix(3, 0)


def test_erased_records_are_gone_and_the_others_are_still_read(run):
    fill(run)
    with Ledger(run, cache_bytes=0) as ledger:
        assert ledger.erase([0]).num_samples == 1
        assert ledger.trajectories(1, 0)[0].num_sampled == 3
    assert breaks(run) == []


def test_no_nonce_is_used_twice_after_a_failed_transaction(run, monkeypatch):
    offsets: list[tuple[int, int]] = []
    ciphers: list[record_cipher.RecordCipher] = []
    sealed = record_cipher.RecordCipher.sealed

    def spied(self: record_cipher.RecordCipher, payload: bytes, offset: int) -> bytes:
        if self not in ciphers:
            ciphers.append(self)
        offsets.append((ciphers.index(self), offset))
        return sealed(self, payload, offset)

    monkeypatch.setattr(record_cipher.RecordCipher, "sealed", spied)
    store = SegmentStore(run / "segments", segment_bytes=1 << 20, fsync=False)
    for payload in (b"a", b"bb", b"ccc"):
        store.append(payload)
        store.discard()
        store.append(payload)
        store.flush()
    store.close()
    assert len(set(offsets)) == len(offsets) == 6
