"""What is remembered of earlier rows."""

from __future__ import annotations

import pytest

from areal_like.errors import OperationError
from controller.preflight.dataset.index import SeenTexts, SimilarTexts
from controller.preflight.dataset.sketches import Sketch


def fill(index: SeenTexts | SimilarTexts) -> None:
    index._database.execute("PRAGMA max_page_count = 3")
    for number in range(10_000):
        if isinstance(index, SeenTexts):
            index.find_or_add(number.to_bytes(16, "big"), "rows.jsonl:1", b"")
        else:
            index.find_or_add(Sketch((2 * number, 2 * number + 1), b"1234"), "rows.jsonl:1")


@pytest.mark.parametrize("index", [SeenTexts(), SimilarTexts(0.6)])
def test_a_full_disk_is_one_sentence_with_a_remedy(index: SeenTexts | SimilarTexts) -> None:
    with pytest.raises(OperationError, match="full; set SQLITE_TMPDIR to a folder with more space"):
        fill(index)
    index.close()
