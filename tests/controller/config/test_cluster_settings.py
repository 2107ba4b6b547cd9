"""Claims about `launch.kind: ray` in a config: what it sets, what it refuses."""

from __future__ import annotations

import builtins
import socket
from typing import Any

import pytest

from areal_like.errors import UserError
from controller.config.loading import load_config
from controller.launch.cluster.connection import Cluster, import_ray

RAY = ["launch.kind=ray", "runs_dir=/tmp/runs"]


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config("quickstart", [*RAY, *overrides])
    return str(caught.value)


def test_weights_are_streamed_unless_reported_otherwise():
    assert load_config("quickstart", RAY).config.trainer.weights.kind == "stream"
    assert load_config("quickstart").config.trainer.weights.kind == "shm"
    shared = [*RAY, "trainer.weights={kind: disk, shared_dir: /tmp/weights}"]
    assert load_config("quickstart", shared).config.trainer.weights.kind == "disk"


def test_resolved_config_is_valid_again():
    from controller.config.loading import build

    config = load_config("quickstart", RAY).config
    again, problems = build(config.model_dump(mode="json"))
    assert not problems
    assert again == config


@pytest.mark.parametrize("kind", ["shm", "disk"])
def test_weights_that_other_hosts_cannot_see_are_refused(kind: str):
    assert "other hosts" in refusal(f"trainer.weights.kind={kind}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("runs_dir=runs", "`runs` is a relative path"),
        ("runs_dir=/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs", "is deleted with the job"),
        ("launch.host=10.0.0.1", "launch.ray.host: 10.0.0.1"),
        ("rollout.engine.device=cuda:1", "rollout.engine.device: cuda"),
        ("trainer.device=cuda:0", "trainer.device: cuda"),
        ("launch.ray.local_dir=here", "is relative"),
        ("launch.ray.rollout={resources: {GPU: 1}}", "launch.ray.rollout.gpus"),
        ("launch.ray.trainer={resources: {disk: 0}}", "must be greater than 0"),
        ("launch.ray.rolout={cpus: 1}", "did you mean launch.ray.rollout"),
        ("rollout.engine.kind=sglang", "use the absolute path of the SGLang interpreter"),
    ],
)
def test_what_cannot_work_on_a_cluster_is_refused_with_a_remedy(override: str, words: str):
    assert words in refusal(override)


def test_shared_devices_are_refused_where_every_pool_has_its_own():
    assert "cannot share devices" in refusal("mode=sync", "placement=colocated")


def test_no_gpu_set_aside_for_a_cuda_device_is_refused():
    assert "no GPU is reserved" in refusal("trainer.device=cuda", "launch.ray.trainer.gpus=0")


def test_section_for_ray_without_ray_is_refused():
    with pytest.raises(UserError, match="applies to a different launcher"):
        load_config("quickstart", ["launch.ray.rollout.cpus=2"])


def test_devices_are_the_ones_ray_shows_each_process():
    config = load_config("quickstart", [*RAY, "rollout.engine.device=cuda", "rollout.num_workers=3"]).config
    assert config.rollout_devices == ("cuda",) * 3


def test_cluster_that_is_not_there_is_reported_at_once(monkeypatch: pytest.MonkeyPatch):
    """Ray itself tries for more than ten minutes."""
    pytest.importorskip("ray", reason="the `ray` package is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(UserError, match=f"no Ray cluster is reachable at `{address}`"):
        Cluster(address).open("test")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match="no Ray cluster"):
        Cluster("auto").open("test")


def test_missing_ray_is_one_sentence_naming_the_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without_ray(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "ray" or name.startswith("ray."):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(UserError, match=r"areal-like\[ray\]"):
        import_ray()
