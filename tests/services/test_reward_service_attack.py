"""A reward service that stands alone under attack: it lives, scores afterwards, and its memory is bounded."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from attack import GROWTH_BYTES, STRANGERS, PeakMemory, key_without_token
from standing_harness import Standing, command, connected, task

from areal_like.transport.credentials import make_service_credentials, service_keys_folder

pytestmark = pytest.mark.processes

SETTINGS = {"scorers": [{"kind": "scorer_zoo:score"}], "num_workers": 1, "num_spares": 0, "cache_mb": 0}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Standing]:
    standing = Standing(tmp_path, SETTINGS)
    yield standing
    standing.close()


async def _score(address: str) -> float:
    async with connected([address]) as client:
        return (await client.score(task("length"), "four", "stop", 1)).value


def _refused(service: Standing) -> bool:
    """Whether the service refused a Hello without a token, and messages of a peer that is not registered."""
    counters = service.stats().counters
    return min(counters.get("hub.rejected_hello", 0), counters.get("hub.rejected_unknown_peer", 0)) > 0


def test_service_survives_strangers_and_key_holders_without_a_token(service: Standing) -> None:
    assert asyncio.run(_score(service.address)) == 4.0
    with PeakMemory(service.process.pid) as memory:
        for attack in STRANGERS:
            attack(service.address)
        key_without_token(service.address, service_keys_folder(), refused=lambda: _refused(service))
        assert asyncio.run(_score(service.address)) == 4.0
    assert _refused(service), service.stats().counters
    assert memory.growth < GROWTH_BYTES, f"{memory.growth >> 20} MiB"
    assert service.process.poll() is None


def test_service_and_clients_of_one_user_find_the_same_keys_by_themselves(service: Standing) -> None:
    keys = service_keys_folder()
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}
    assert keys.stat().st_mode & 0o777 == 0o700
    assert re.search(rf"(created|using) keys in {re.escape(str(keys))}; copy this folder", service.log)
    assert command("status", service.address, "--timeout-s", "250").returncode == 0


def test_client_without_the_service_secret_is_served_and_one_with_other_keys_is_not(
    service: Standing, tmp_path: Path
) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    copy.mkdir(mode=0o700)
    for path in service_keys_folder().iterdir():
        if path.name != "server.secret":
            (copy / path.name).touch(mode=0o600)
            (copy / path.name).write_bytes(path.read_bytes())
    make_service_credentials(other)
    assert command("status", service.address, "--curve-dir", str(copy), "--timeout-s", "250").returncode == 0
    assert command("status", service.address, "--curve-dir", str(other), "--timeout-s", "0.5").returncode == 1
    missing = command("status", service.address, "--curve-dir", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert "create its keys or copy them to this folder" in missing.stderr
