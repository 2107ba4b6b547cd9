"""benchmarks/reward_service.py: what it leaves behind, and how that is shown; the service itself is not started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import folders, page, reward_service


def found(*, worst_s: float = 1.5) -> dict[str, dict[str, list[float]]]:
    one = {
        "recovery_s": [0.5, worst_s, 0.25],
        "alone_per_s": [300.0, 310.0, 290.0],
        "beside_per_s": [160.0, 150.0, 90.0],
    }
    return {do: one for do in reward_service.WILD}


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, result: dict[str, Any], *arguments: str
) -> tuple[int | str | None, Path]:
    async def measure(*_: object) -> dict[str, Any]:
        return result

    monkeypatch.setattr(reward_service, "measure", measure)
    monkeypatch.setattr(folders, "RESULTS", folder)
    monkeypatch.setattr("sys.argv", ["reward_service", *arguments])
    with pytest.raises(SystemExit) as ended:
        reward_service.main()
    return ended.value.code, folder / "reward_service.json"


@pytest.mark.processes
def test_the_result_says_what_made_it_and_its_page_shows_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, path = run(monkeypatch, tmp_path, found())
    result = json.loads(path.read_text())
    assert (status, result["command"], result["limit_s"]) == (0, "python -m benchmarks.reward_service", 2.0)
    text = page.publish("reward_service", path).read_text()
    for words in ("hangs", "segfaults", "takes all the memory", "forks daemons"):
        assert words in text
    assert "0.50 (0.25 to 1.50)" in text
    assert "<svg" in text


def test_a_quick_run_leaves_what_was_published_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, path = run(monkeypatch, tmp_path, found(worst_s=2.5), "--quick")
    assert (status, path.exists()) == (1, False)


def test_the_documentation_has_a_place_for_it() -> None:
    assert "<!-- measured: reward_service -->" in (folders.REPOSITORY / "docs" / "benchmarks.md").read_text()
