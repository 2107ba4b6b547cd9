"""Claims about what is said of a server that does not become ready in time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import EngineError
from rollout.engine.server.http import ServerGone
from rollout.engine.server.keeper import ModelFolder, ServerKeeper

URL = "http://127.0.0.1:1"


class SilentClient:
    url = URL

    async def probe(self) -> None:
        raise ServerGone("no response")


@pytest.mark.parametrize(
    ("is_launched", "remedy"),
    [(True, "see its log w.log, or raise launch.startup_timeout_s"), (False, f"check the server at {URL}")],
)
def test_server_that_is_not_ready_in_time_is_an_error_with_a_remedy(is_launched: bool, remedy: str) -> None:
    kind: Any = SimpleNamespace(title="SGLang")
    limits: Any = SimpleNamespace(control_timeout_s=-1.0)
    process: Any = SimpleNamespace(why_ended=lambda: None) if is_launched else None
    client: Any = SilentClient()
    keeper = ServerKeeper(
        kind, limits, ModelFolder(Path("model"), -1), url=None if is_launched else URL, seed=0, log_path=Path("w.log"),
        stalled_s=lambda: 0.0, start_timeout_s=-1.0,
    )  # fmt: skip
    with pytest.raises(EngineError) as raised:
        asyncio.run(keeper._wait_ready(client, process))
    assert str(raised.value) == f"the SGLang server was not ready within -1 s: no response; {remedy}"
