"""An encrypted job is not started without its key."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")

from areal_like.errors import UserError
from controller.cli.jobs import new_folder
from controller.config.loading import load_config


def test_a_key_that_cannot_be_read_leaves_no_folder_behind(tmp_path):
    settings = ["warm_start=null", "encryption.key_file=/no/run.key", f"runs_dir={tmp_path / 'runs'}"]
    config = load_config("quickstart", settings).config
    with pytest.raises(UserError, match=r"the key cannot be read from the file /no/run.key"):
        new_folder(config, "job", "train", {})
    assert list((tmp_path / "runs").iterdir()) == []
