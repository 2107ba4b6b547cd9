"""A recorded run, and a copy to change."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_run import copy_run, make_recorded_run

from controller.run_folder.run_folder import RunFolder
from controller.run_folder.seal import SEAL_FILE


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_recorded_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copy(run: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy without the seal: digests and checksums alone must find a change."""
    folder = copy_run(run, tmp_path / "copy")
    (folder.root / SEAL_FILE).unlink()
    return folder
