"""Claims about checkpoints that all ranks write: complete or not there, whichever rank fails. Ranks are threads."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_like.errors import OperationError, UserError, WeightError
from areal_like.weights.tensor_parts import part_name, tensors_in
from controller.config.model_folder import check_weights, tensor_shapes
from controller.runs.replay.tensors import compare_folders, digests_in
from trainer import rank_parts as module
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointState, Retention
from trainer.checkpoints.compare_export import other_tensor
from trainer.checkpoints.convert import export_checkpoint, stored_tensors
from trainer.export import named_tensors, write_model
from trainer.host_copy import Copied, HostCopy, Part
from trainer.model.model import load_causal_lm, weight_files
from trainer.model.outline import SlicedSource, outline, sliced_source
from trainer.peer_errors import RankLost
from trainer.rank_parts import PartFile, PartMessages, PartReport, RankParts, check_shared
from trainer.training_state import check_architecture

LIMIT_S = 60.0
SIZE = 3
TENSORS = {"weight/a": torch.arange(40.0).view(8, 5), "exp_avg/a": -torch.arange(40.0).view(8, 5)}
MORE = {"generator/cpu": torch.arange(7, dtype=torch.uint8), "step/a": torch.tensor(3.0)}


def copied_by(rank: int) -> Copied:
    """Rows as FSDP2 divides them: 3, 3 and 2."""
    start, end = rank * 15, min(40, rank * 15 + 15)
    return HostCopy().take(
        [Part(key, tuple(tensor.shape), start, tensor.view(-1)[start:end]) for key, tensor in TENSORS.items()]
    )


class LocalMessages(PartMessages):
    """Messages between threads; a rank that ends early is lost."""

    def __init__(self, size: int = SIZE) -> None:
        self._size, self._barrier = size, threading.Barrier(size, timeout=LIMIT_S)
        self._path: list[str] = []
        self._values: list[Any] = []
        self._lock = threading.Lock()
        self.num_rounds = 0

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankLost("the other ranks of the trainer were lost") from error

    def lose(self) -> None:
        self._barrier.abort()

    def send_path(self, path: str) -> None:
        self._path.append(path)
        self._meet()

    def receive_path(self) -> str:
        self._meet()
        return self._path[-1]

    def _all(self, value: Any) -> list[Any]:
        with self._lock:
            self._values.append(value)
        self._meet()
        found = list(self._values)
        self._meet()
        with self._lock:
            self._values.clear()
        self._meet()
        return found

    def sum(self, *flags: bool) -> list[int]:
        self.num_rounds += 1
        return [sum(column) for column in zip(*self._all(flags), strict=True)]

    def gather(self, own: PartReport) -> list[PartReport]:
        rank = int(threading.current_thread().name.rpartition("_")[2])
        return [report for _, report in sorted(self._all((rank, own)), key=lambda one: one[0])]


def save_together(
    run_dir: Path, version: int = 2, *, write_rest: Callable[[Path], None] = lambda partial: None
) -> tuple[list[Any], LocalMessages]:
    """One checkpoint by SIZE ranks; the result or error of each, and the messages."""
    messages = LocalMessages()
    start = threading.Barrier(SIZE, timeout=LIMIT_S)

    def work(rank: int) -> Any:
        threading.current_thread().name = f"rank_{rank}"
        start.wait()
        parts = RankParts(messages, rank, SIZE)
        try:
            if rank:
                return parts.follow(copied_by(rank))
            state = CheckpointState(version=version, lineage="l0", run_id="t", config_digest="d")
            return parts.lead(run_dir, state, copied_by(0), MORE, write_rest, Retention(keep=9))
        except (Exception, SystemExit) as error:
            if not isinstance(error, OperationError) or isinstance(error, RankLost):
                messages.lose()
            return error

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(work, range(SIZE))), messages


def test_parts_of_all_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    (result, *others), _ = save_together(tmp_path, write_rest=lambda partial: (partial / "x").touch())
    folder, num_bytes = result
    assert others == [None, None]
    assert folder == checkpoint.checkpoint_folder(tmp_path, 2)
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    assert checkpoint.added(folder) == []
    checkpoint.verify(folder)
    parts = [part_name(rank, SIZE) for rank in range(SIZE)]
    assert {file.name for file in folder.iterdir()} == {*parts, "x", "state.json", "manifest.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == 3
    for name in parts:
        data = (folder / name).read_bytes()
        assert manifest["files"][name] == {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert num_bytes == sum(file.stat().st_size for file in folder.iterdir() if file.name != "manifest.json")
    found = tensors_in(folder)
    assert found.keys() == {*TENSORS, *MORE}
    for key, tensor in {**TENSORS, **MORE}.items():
        assert found[key].shape == tuple(tensor.shape)
        assert found[key].bytes_of().tobytes() == tensor.numpy().tobytes()


def test_ranks_agree_while_a_slow_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time for a round each has one piece of its file."""
    monkeypatch.setattr(module, "ROUND_S", -1.0)
    (result, *_), messages = save_together(tmp_path)
    assert isinstance(result, tuple)
    assert messages.num_rounds == SIZE * 5, "rank 0 has four tensors, and then its end"


def failing_on(rank: int, at_write: int, error: BaseException) -> Callable[..., int]:
    right, num = module.put_bytes, [0]

    def put(opened: Any, digest: Any, data: memoryview) -> int:
        if Path(opened.name).name == part_name(rank, SIZE):
            num[0] += 1
            if num[0] == at_write:
                raise error
        return right(opened, digest, data)

    return put


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full; the previous contents are unchanged"),
        (OSError(errno.EIO, "Input/output error"), r"rank \d on \S+: Input/output error; the previous contents"),
        (MemoryError("of the host"), r"rank \d on \S+: MemoryError: of the host; the previous contents"),
    ],
)
def test_rank_that_cannot_write_costs_that_checkpoint_and_the_next_one_is_written(
    error: Exception, words: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_together(tmp_path, 1)
    with monkeypatch.context() as broken:
        broken.setattr(module, "put_bytes", failing_on(rank, 2, error))
        (result, *others), _ = save_together(tmp_path, 2)
    assert others == [None, None]
    assert isinstance(result, OperationError)
    with pytest.raises(OperationError, match=words):
        raise result
    (only,) = (tmp_path / "checkpoints").iterdir()
    checkpoint.verify(only)
    (result, *_), _ = save_together(tmp_path, 3)
    checkpoint.verify(result[0])


@pytest.mark.parametrize("rank", range(SIZE))
def test_rank_that_is_lost_leaves_the_earlier_checkpoint_and_nothing_else(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary folder may stay if rank 0 is lost while another rank creates its file; the next checkpoint removes
    it."""
    save_together(tmp_path, 1)
    with monkeypatch.context() as broken:
        broken.setattr(module, "put_bytes", failing_on(rank, 3, SystemExit("killed")))
        results, _ = save_together(tmp_path, 2)
    assert isinstance(results.pop(rank), SystemExit)
    assert all(isinstance(one, RankLost) for one in results)
    (only,) = (one for one in (tmp_path / "checkpoints").iterdir() if not one.name.endswith(".partial"))
    checkpoint.verify(only)
    save_together(tmp_path, 2)
    assert sorted(one.name for one in only.parent.iterdir()) == [only.name, checkpoint.checkpoint_folder(only, 2).name]


def test_failure_before_the_parts_sends_the_others_home(tmp_path: Path) -> None:
    def fail(partial: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (result, *others), messages = save_together(tmp_path, write_rest=fail)
    assert "the disk is full" in str(result)
    assert others == [None, None]
    assert messages.num_rounds == 0
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_folder_that_a_rank_does_not_see_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = LocalMessages.receive_path
    monkeypatch.setattr(LocalMessages, "receive_path", lambda self: right(self).replace("checkpoints", "elsewhere"))
    (result, *_), _ = save_together(tmp_path)
    assert "rank 1 on " in str(result)
    assert str(tmp_path / "checkpoints") in str(result)
    assert "set trainer.checkpoint.parts: rank_0" in str(result)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_file_that_rank_0_does_not_see_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has the same path on another machine."""
    twin = tmp_path / "twin"
    twin.mkdir()
    right = LocalMessages.receive_path
    monkeypatch.setattr(LocalMessages, "receive_path", lambda self: right(self) and str(twin))
    (result, *_), _ = save_together(tmp_path)
    assert "do not see the same folder" in str(result)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("is_missing", [True, False])
def test_missing_and_altered_parts_are_named(is_missing: bool, tmp_path: Path) -> None:
    (result, *_), _ = save_together(tmp_path)
    file = result[0] / part_name(1, SIZE)
    if is_missing:
        file.unlink()
        words = rf"{file.name} of the checkpoint cannot be read"
    else:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
        words = rf"{file.name} is damaged: its checksum differs"
    with pytest.raises(WeightError, match=words):
        checkpoint.verify(result[0])
    shares = []
    for share in range(SIZE):
        try:
            checkpoint.verify(result[0], share=share, num_shares=SIZE)
        except WeightError:
            shares.append(share)
    assert len(shares) == 1, "one of the ranks finds it"


def test_part_file_writes_at_least_one_piece_at_a_time_and_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    monkeypatch.setattr(module, "PIECE_BYTES", 40)
    monkeypatch.setattr(module, "FLUSH_BYTES", 50)
    file = PartFile(tmp_path / "one", copied_by(0))
    assert not list(tmp_path.iterdir())
    num = 0
    while not file.advance(0.0):
        num += 1
        assert file.facts is None
    assert num == 4
    data = (tmp_path / "one").read_bytes()
    assert file.facts == (len(data), hashlib.sha256(data).hexdigest())
    assert flushed == [len(data) - 120 + 60, len(data), len(data)]


def test_folder_is_checked_by_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(rank: int, total: int, first: int) -> Any:
        return SimpleNamespace(
            rank=rank, size=2, is_leader=not rank, device="cpu", sum=lambda values: torch.tensor([total]),
            min=lambda values: torch.minimum(values, torch.tensor([first])),
        )  # fmt: skip

    folder = tmp_path / "checkpoints"
    check_shared(ranks(0, os.getpid(), 2), folder)
    assert list(folder.iterdir()) == []
    (folder / ".shared.7.partial").mkdir()
    check_shared(ranks(1, 7, 2), folder)
    for other, where in ((ranks(1, 8, 2), folder), (ranks(1, 7, 1), folder), (ranks(1, 7, 2), tmp_path)):
        with pytest.raises(
            UserError, match=r"rank 1 does not see the folder .* set trainer\.checkpoint\.parts: rank_0"
        ):
            check_shared(other, where)
    with monkeypatch.context() as refused:
        refused.setattr(os, "stat", lambda *_, **__: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
        with pytest.raises(UserError, match="rank 1 does not see the folder"):
            check_shared(ranks(1, 7, 2), folder)
    monkeypatch.setattr(
        Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EACCES, "Permission denied"))
    )
    with pytest.raises(UserError, match=r"rank 0 cannot create the folder of checkpoints \(Permission denied\)"):
        check_shared(ranks(0, 0, 2), folder)
    with pytest.raises(UserError, match="rank 0 cannot create the folder of checkpoints ->"):
        check_shared(ranks(1, 0, 2), folder)


def test_columns_have_their_place_and_a_rank_without_parts_an_empty_file(tmp_path: Path) -> None:
    """As of tensor parallelism, and of a replica whose parts another one counts."""
    full = torch.arange(40.0).view(8, 5)
    parts = [
        [Part("weight/a", (8, 5), 0, full[:, :2].contiguous(), 2)],
        [Part("weight/a", (8, 5), 2, full[:, 2:].contiguous(), 3)],
        [],
    ]
    for rank, own in enumerate(parts):
        assert PartFile(tmp_path / part_name(rank, 3), HostCopy().take(own)).advance(time.monotonic() + LIMIT_S)
    found = tensors_in(tmp_path)["weight/a"]
    assert [piece.range.width for piece in found.pieces] == [2, 3]
    assert found.bytes_of().tobytes() == full.numpy().tobytes()


def model_in_parts(folder: Path, model: Any, size: int = 2) -> None:
    """The weights of a model as ranks with rows of them write them, and its config."""
    folder.mkdir()
    write_model(model, folder, dtype="float32")
    (folder / "model.safetensors").unlink()
    for rank in range(size):
        parts = []
        for name, tensor in named_tensors(model).items():
            rows = -(-len(tensor) // size) * tensor[:1].numel()
            start = min(rank * rows, tensor.numel())
            parts.append(Part(f"weight/{name}", tuple(tensor.shape), start, tensor.view(-1)[start : start + rows]))
        assert PartFile(folder / part_name(rank, size), HostCopy().take(parts)).advance(time.monotonic() + LIMIT_S)


@pytest.mark.parametrize("is_tied", [True, False])
def test_model_in_parts_is_loaded_like_one_in_full(is_tied: bool, tmp_path: Path, tiny_model: Any) -> None:
    model = tiny_model(tie_word_embeddings=is_tied)
    (tmp_path / "whole").mkdir()
    write_model(model, tmp_path / "whole", dtype="float32")
    model_in_parts(tmp_path / "parts", model)
    expected, found = (load_causal_lm(tmp_path / name) for name in ("whole", "parts"))
    assert type(found) is type(expected)
    assert found.config.name_or_path == str(tmp_path / "parts")
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(found.state_dict()[name], one) for name, one in expected.state_dict().items())
    ids = torch.arange(9)[None]
    assert torch.equal(found(ids).logits, expected(ids).logits)
    made = outline(tmp_path / "parts")
    source = sliced_source(tmp_path / "parts", made, 1 << 10)
    assert source is not None
    for name, tensor in named_tensors(expected).items():
        out = torch.empty_like(tensor)
        source.read(name, 0, out)
        assert torch.equal(out, tensor)
    check_architecture(tmp_path / "parts", tmp_path / "whole")
    with pytest.raises(
        UserError, match="parts of a checkpoint, not a Hugging Face folder -> convert it with areal-like"
    ):
        weight_files(tmp_path / "parts")
    with pytest.raises(UserError, match="the folder is a checkpoint in the parts of several ranks -> convert it with"):
        check_weights(tmp_path / "parts")
    assert tensor_shapes(str(tmp_path / "parts")) == {}, "not those of ranges"
    (tmp_path / "parts" / part_name(1, 2)).unlink()
    with pytest.raises(WeightError, match=r"part-00001-of-00002\.safetensors is missing, one of the 2 parts"):
        load_causal_lm(tmp_path / "parts")


@pytest.mark.parametrize(("first", "num", "width"), [(3, 31, 0), (6, 21, 3)])
def test_parts_in_16_bits_are_read_in_pieces(first: int, num: int, width: int, tmp_path: Path) -> None:
    full = torch.randn(8, 5).bfloat16()
    copied = HostCopy().take([Part("weight/a", (8, 5), 0, full)])
    assert PartFile(tmp_path / part_name(0, 1), copied).advance(time.monotonic() + LIMIT_S)
    source = SlicedSource(stored_tensors(tmp_path), 1)
    monitored = torch.empty(num)
    source.read("a", first, monitored, width)
    expected = full[1:8, 1:4].reshape(-1) if width else full.view(-1)[first : first + num]
    assert torch.equal(monitored, expected.float())


def test_export_and_digests_do_not_depend_on_the_form(tmp_path: Path) -> None:
    def write_config(partial: Path) -> None:
        (partial / "config.json").write_text('{"model_type": "qwen3"}')

    (result, *_), _ = save_together(tmp_path, write_rest=write_config)
    assert export_checkpoint(result[0], tmp_path / "out") == "float32"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"a"}
    assert torch.equal(found["a"], TENSORS["weight/a"])
    assert other_tensor(tmp_path / "out", result[0]) is None
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({"a": TENSORS["weight/a"]}, plain / "model.safetensors")
    save_file({"exp_avg/a": TENSORS["exp_avg/a"], **MORE}, plain / "optimizer.safetensors")
    assert digests_in(result[0]) == digests_in(plain)
    assert compare_folders(plain, result[0])[0] is None
    save_file({"a": TENSORS["weight/a"] + 1}, plain / "model.safetensors")
    different, _ = compare_folders(plain, result[0])
    assert different is not None
    assert (different.name, different.words) == ("model: a", "40 of 40 values differ, by at most 1")


def test_a_part_is_read_as_numpy_has_it(tmp_path: Path) -> None:
    (result, *_), _ = save_together(tmp_path)
    out_U = np.zeros(6 * 2 * 4, np.uint8)
    tensors_in(result[0])["weight/a"].read(5 + 1, 12, out_U, 2)  # columns 1 and 2 of six rows, of all ranks
    assert out_U.view(np.float32).tolist() == TENSORS["weight/a"][1:7, 1:3].reshape(-1).tolist()
