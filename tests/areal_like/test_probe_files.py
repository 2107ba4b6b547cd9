"""The life of one of the probe's processes: it answers its order in a file, or says the user's mistake."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_like.errors import UserError
from areal_like.probe_files import LogprobSpec, ProbeAnswers, ProbeSpec, TryAnswer, TrySpec, run_spec
from areal_like.wire.messages import Sampling

TRY = TrySpec(settings={"a": 1}, answers=[TryAnswer(row={"prompt": "3"}, response="7")])
LOGPROBS = LogprobSpec(
    model_dir="m", device="cpu", precision="float32", attention="sdpa", temperature=1.0, num_threads=1,
    sequences=[([1, 2], [3])],
)  # fmt: skip
PROBE = ProbeSpec(
    model_dir="m", tokenizer="t", dtype="float32", manifest="v0", settings={}, sampling=Sampling(max_new_tokens=4),
    rows=[{"prompt": "3"}], num_samples=2, seed=1, num_threads=1, startup_timeout_s=5.0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def order_file(tmp_path: Path) -> Path:
    path = tmp_path / "order.json"
    path.write_bytes(msgspec.json.encode(TRY))
    return path


def test_result_of_the_work_is_written_as_json(order_file: Path, tmp_path: Path) -> None:
    orders: list[TrySpec] = []

    def work(order: TrySpec) -> list[float]:
        orders.append(order)
        return [0.5, 1.0]

    run_spec(order_file, tmp_path / "answer.json", TrySpec, work)
    assert orders == [TRY]
    assert msgspec.json.decode((tmp_path / "answer.json").read_bytes()) == [0.5, 1.0]


def test_modules_of_the_user_are_found_during_the_work(
    order_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_LIKE_USER_PATH", str(tmp_path))
    run_spec(order_file, tmp_path / "answer.json", TrySpec, lambda _: sys.path)
    assert str(tmp_path) in msgspec.json.decode((tmp_path / "answer.json").read_bytes())


def test_mistake_of_the_user_is_one_line_and_the_status_2(
    order_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ended(BaseException):
        """In place of the end of the process."""

    def end(status: int) -> None:
        raise Ended(status)

    def work(_: TrySpec) -> Any:
        raise UserError("no scorer `x`", where="reward.scorers")

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended) as ended:
        run_spec(order_file, tmp_path / "answer.json", TrySpec, work)
    assert ended.value.args == (2,)
    assert capsys.readouterr().err == "error: reward.scorers: no scorer `x`\n"
    assert not (tmp_path / "answer.json").exists()


@pytest.mark.parametrize("order", [TRY, LOGPROBS, PROBE], ids=lambda order: type(order).__name__)
def test_order_with_an_unknown_field_is_refused(order: Any) -> None:
    fields = msgspec.to_builtins(order)
    assert msgspec.convert(fields, type(order)) == order
    with pytest.raises(msgspec.ValidationError, match="unknown field `extra`"):
        msgspec.convert({**fields, "extra": 1}, type(order))


def test_answer_to_try_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `extra`"):
        msgspec.convert({"row": {}, "response": "", "extra": 1}, TryAnswer)


def test_answer_to_try_is_complete_and_of_no_known_length_unless_it_says_so() -> None:
    answer = TryAnswer(row={}, response="7")
    assert (answer.finish_reason, answer.num_tokens) == ("stop", 0)


def test_order_that_led_to_nothing_found_nothing_wrong() -> None:
    found = ProbeAnswers()
    assert not any(getattr(found, name) for name in found.__struct_fields__)
