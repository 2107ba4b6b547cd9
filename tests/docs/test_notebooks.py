"""The notebooks of the documentation are executed, and their pages show what they print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")
traitlets_config = pytest.importorskip("traitlets.config", reason="traitlets is not installed")

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((REPOSITORY / "docs" / "notebooks").glob("*.ipynb"))
TIMEOUT_S = 900
"""Of one cell; it only bounds a hang."""
SOCKET_FILES = traitlets_config.Config({"KernelManager": {"transport": "ipc"}})
"""A port that is free when the client chooses it may be in use when the kernel starts, which then ends."""


class Client(nbclient.NotebookClient):  # type: ignore[misc]
    """Ends the thread of the heartbeat first: jupyter_client 8.10 closes its socket while it is in use (ENOTSOCK)."""

    async def _async_cleanup_kernel(self) -> None:
        if self.kc is not None and self.kc.hb_channel.is_alive():
            self.kc.hb_channel.stop()
        await super()._async_cleanup_kernel()


def printed(notebook: Any) -> list[str]:
    """What each code cell printed or returned, in order."""
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
            texts.append("".join(outputs))
    return texts


QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
DURATION = r"(?:\d+ (?:s|min|h|d) ?)+ago|just now"


def words(text: str) -> str:
    """What a cell printed, without what differs from run to run.

    Numbers and times become letters. Lines that show an answer keep their form only: its text is sampled.
    """
    lines = []
    for line in text.strip().splitlines():
        if line.startswith("<bos>"):
            line = "SAMPLE"
        elif " -> '" in line or ' -> "' in line:
            line = re.sub(QUOTED, "SAMPLE", line)
        line = re.sub(DURATION, "T ago", line)
        line = re.sub(r"[-+]?\d+(?:\.\d+)?", "N", line)
        lines.append(" ".join(line.split()))
    return "\n".join(lines)


def test_words_differ_where_the_words_of_two_outputs_do_and_not_where_numbers_and_samples_do() -> None:
    shown = "step 40\n  0.88  '<bos>Only \\'a\\':' -> \"o'y\"\naudit 13 s ago: clean"
    assert words(shown) == "step N\nN SAMPLE -> SAMPLE\naudit T ago: clean"
    assert words(shown) == words("step 3\n  -1.5  \"<bos>digits:\" -> ''\naudit 1 min 2 s ago: clean")
    assert words(shown) != words(shown.replace("clean", "broken"))
    assert words(shown) != words(shown.replace("step 40\n", ""))
    assert words("<bos>Only: [(35, 'u')]") == words("<bos>All: [(1, 'a'), (2, 'b')]")


def test_there_are_three_and_each_has_its_output() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "own_reward", "reading_a_run"]
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run from top to bottom"
        assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
        for folder in ("/tmp/", "/home/", "/root/"):
            assert folder not in path.read_text()


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_its_page_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    stored = nbformat.read(path, as_version=4)
    executed = nbformat.read(path, as_version=4)
    client = Client(executed, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    for ours, theirs in zip(printed(executed), printed(stored), strict=True):
        assert words(ours) == words(theirs)
