"""Claims about rows as tokens: what is trained on, and that no row is ever cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_offline import CHATML, make_spec, write_rows
from transformers import PreTrainedTokenizerBase

from areal_like.errors import UserError
from trainer.model.tokenizers import build_tokenizer
from trainer.offline.encoding import load_items
from trainer.offline.opening import starting_folder
from trainer.offline.rows import Demonstration
from trainer.offline.supervised import demonstration_item
from trainer.offline.tasks import prepare_task
from trainer.sft import ExampleEncoder


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = build_tokenizer("bytes", None)
    tokenizer.chat_template = CHATML
    return tokenizer


def trained_text(tokenizer: PreTrainedTokenizerBase, row: Demonstration) -> str:
    item = demonstration_item(ExampleEncoder(tokenizer, eos_token_id=2, max_tokens=200), row)
    return str(tokenizer.decode(item.tokens_S[0][item.masks_S[0]]))


def test_only_the_completion_of_a_conversation_is_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    user, first, second = {"role": "user", "content": "q"}, *({"role": "assistant", "content": c} for c in ("A", "B"))
    messages = [user, first, user, second]
    assert trained_text(tokenizer, Demonstration("f:1", {"messages": messages})) == "A<eos>B<eos>"
    assert trained_text(tokenizer, Demonstration("f:1", {"messages": messages}, num_given=3)) == "B<eos>"
    assert trained_text(tokenizer, Demonstration("f:1", {"prompt": "q", "response": "C"})) == "C<eos>"


def test_too_long_rows_are_left_out_and_counted_by_line(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "completion": "2" * length} for length in (3, 60, 4, 45)]
    spec = make_spec(tmp_path, data={"train": write_rows(tmp_path / "long.jsonl", rows), "max_tokens": 999})
    train = prepare_task(spec, starting_folder(spec)).train
    assert [item.num_tokens for item in train.items] == [6, 7, 48]  # 48 positions: <bos> prompt answer <eos>
    assert train.words(48) == (
        f"1 of 4 rows of {tmp_path / 'long.jsonl'} are longer than 48 tokens and are skipped: line 2"
    )
    items = [np.asarray(item.tokens_S[0]) for item in train.items]
    assert all(tokens_T[-1] == 2 for tokens_T in items), "a row was cut"


@pytest.mark.parametrize(
    ("lengths", "on_long", "words"),
    [
        (
            (3, 60),
            "stop",
            r"long.jsonl:2: prompt and response have 63 tokens, but the limit is 48 -> .*data.max_tokens",
        ),
        ((60, 61), "drop", r"long.jsonl: all rows are too long; in the first row, .* 63 tokens"),
    ],
)
def test_too_long_rows_can_stop_the_run(tmp_path: Path, lengths: tuple[int, ...], on_long: str, words: str) -> None:
    rows = [{"prompt": "1", "completion": "2" * length} for length in lengths]
    data = {"train": write_rows(tmp_path / "long.jsonl", rows), "on_long": on_long}
    spec = make_spec(tmp_path, data=data)
    with pytest.raises(UserError, match=words):
        prepare_task(spec, starting_folder(spec))


def test_more_than_five_long_rows_are_counted_not_listed() -> None:
    def encode(place: int) -> object:
        from trainer.sft import SequenceTooLong

        if place:
            raise SequenceTooLong("is long", where=f"f:{place}")
        return object()

    found = load_items("f", list(range(9)), encode, on_long="drop")  # type: ignore[arg-type]
    assert found.words(7) == "8 of 9 rows of f are longer than 7 tokens and are skipped: line 1, 2, 3, 4, 5 and 3 more"


def test_a_row_the_tokenizer_cannot_express_is_named_by_line(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "completion": "2"}, {"prompt": "1", "completion": "x"}]
    spec = make_spec(tmp_path, data={"train": write_rows(tmp_path / "rows.jsonl", rows)})
    with pytest.raises(UserError, match=r"rows.jsonl:2: the tokenizer cannot encode the response.*'x'"):
        prepare_task(spec, starting_folder(spec))
