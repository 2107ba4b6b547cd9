"""Claims about how far a preparation says it is."""

from __future__ import annotations

from pathlib import Path

from areal_like.metrics import read_jsonl
from trainer.prepare_progress import DOWNLOAD_EVERY_S, PrepareProgress, byte_counter


def test_download_is_reported_once_a_second_and_at_its_end_and_never_goes_back(tmp_path: Path) -> None:
    now_s = [10.0]
    progress = PrepareProgress(tmp_path / "rows.jsonl", clock=lambda: now_s[0])
    progress.downloaded(0, 400)
    progress.downloaded(100, 400)
    progress.downloaded(150, 400)  # too soon
    now_s[0] += DOWNLOAD_EVERY_S
    progress.downloaded(90, 400)  # the other of the hub's two bars
    progress.downloaded(200, 400)
    progress.downloaded(400, 400)
    progress.close()
    assert read_jsonl(tmp_path / "rows.jsonl") == [
        {"num_bytes": 100, "total_bytes": 400, "seconds": 0.0},
        {"num_bytes": 200, "total_bytes": 400, "seconds": 1.0},
        {"num_bytes": 400, "total_bytes": 400, "seconds": 1.0},
    ]


def test_supervised_steps_are_reported_with_their_number(tmp_path: Path) -> None:
    progress = PrepareProgress(tmp_path / "rows.jsonl")
    progress.stepped(50, 300, 1.25, 3.14159)
    progress.close()
    assert read_jsonl(tmp_path / "rows.jsonl") == [{"step": 50, "num_steps": 300, "loss": 1.25, "seconds": 3.142}]


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    progress = PrepareProgress(None)
    progress.downloaded(100, 400)
    progress.stepped(1, 2, 0.5, 0.1)
    progress.close()
    assert list(tmp_path.iterdir()) == []


def test_a_bar_of_the_hub_counts_bytes_and_prints_nothing(capfd) -> None:
    reported: list[tuple[int, int | None]] = []
    counter = byte_counter(lambda num_bytes, total: reported.append((num_bytes, total)))
    bar = counter(total=0, initial=0, unit="B", unit_scale=True, desc="Reconstructing", bar_format="{desc}")
    bar.update(5)
    bar.total = (bar.total or 0) + 10
    bar.refresh()
    bar.update(3)
    files = counter(range(3), total=3, desc="Fetching 3 files", name="huggingface_hub.snapshot_download")
    assert [one for one in files] == [0, 1, 2]
    assert reported == [(5, None), (8, 10)]
    assert capfd.readouterr() == ("", "")
