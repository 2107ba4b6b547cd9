"""Claims about files that a user names: pipes and devices are refused in words, nothing waits for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.regular_file import check_regular


def test_pipes_devices_and_folders_are_refused_and_files_are_not(tmp_path: Path) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.write_text("x")
    for path, words in ((pipe, "named pipe"), (Path("/dev/zero"), "device"), (tmp_path, "folder")):
        with pytest.raises(UserError, match=words):
            check_regular(path)
    check_regular(file)
    check_regular(tmp_path / "missing")
    with pytest.raises(UserError, match="too large"):
        check_regular(file, max_bytes=0)
    check_regular(file, max_bytes=1)
