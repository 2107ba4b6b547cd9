"""Claims about the transfers that come with this program."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from areal_like.import_path import import_factory
from areal_like.weights.registry import BETWEEN_HOSTS, TRANSFERS
from areal_like.weights.stream import Locator
from areal_like.weights.transfer import KIND_KEY, TransferUse
from areal_like.weights.transfers.process_group import PROCESS_GROUP
from trainer.config import WeightStoreSettings


@pytest.mark.parametrize("name", TRANSFERS)
def test_every_name_leads_to_a_descriptor_whose_halves_exist(name: str) -> None:
    transfer = TRANSFERS[name]
    assert transfer.name == name
    assert set(transfer.own_keys) <= set(WeightStoreSettings.model_fields)
    for path in filter(None, (transfer.sender, transfer.receiver)):
        assert callable(import_factory(path, KIND_KEY))


def test_only_what_crosses_hosts_is_the_default_between_hosts() -> None:
    assert [transfer.name for transfer in TRANSFERS.values() if transfer.cannot_cross_hosts is not None] == ["shm"]
    assert TRANSFERS[BETWEEN_HOSTS].cannot_cross_hosts is None
    assert not TRANSFERS[BETWEEN_HOSTS].needs_shared_dir


@pytest.mark.parametrize(("name", "by_group"), [("stream", False), ("distributed", True)])
def test_locations_begin_with_the_scheme(name: str, by_group: bool) -> None:
    place = str(Locator("tcp://h:1", 1, "l0", by_group=by_group))
    assert [
        transfer.name for transfer in TRANSFERS.values() if transfer.scheme and place.startswith(transfer.scheme)
    ] == [name]


def test_store_is_in_memory_of_the_node_where_only_the_trainer_reads_it() -> None:
    for transfer in TRANSFERS.values():
        assert not transfer.is_store_on_trainer_node or transfer.sender


@pytest.mark.parametrize(
    ("backend", "devices", "is_refused"),
    [("nccl", {"cpu", "cuda"}, True), ("nccl", {"cuda"}, False), ("gloo", {"cpu"}, False), ("gloo", {"cuda"}, False)],
)
def test_nccl_connects_gpus_only(backend: str, devices: set[str], is_refused: bool) -> None:
    settings = SimpleNamespace(group=SimpleNamespace(backend=backend))
    use = TransferUse(settings, frozenset(devices), is_across_hosts=False)
    assert [problem.what for problem in PROCESS_GROUP.problems(use)] == [
        "`nccl` requires GPUs, but the trainer or the engine runs on a CPU"
    ] * is_refused


def test_where_versions_are_and_what_each_transfer_needs() -> None:
    facts = {
        name: (one.place, one.layout, one.is_store_on_trainer_node, one.needs_shared_dir, one.needs_process_group)
        for name, one in TRANSFERS.items()
    }
    assert facts == {
        "shm": ("shm", "shm", False, False, False), "disk": ("disk", "disk", False, True, False),
        "stream": ("shm", "disk", True, False, False), "distributed": ("shm", "disk", False, False, True),
    }  # fmt: skip
