"""Claims about what a machine lacks for the built-in scorers, found before anything starts."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from areal_like.external import needs as external_needs
from areal_like.settings import Settings
from services.reward import classifier_folder, scorer_needs
from services.reward.config import RewardSettings, missing, silent_endpoints
from services.reward.scorer_needs import needs_of, unreachable
from services.reward.scorer_registry import SCORERS


def options(kind: str, **values: Any) -> Settings:
    defaults: dict[str, dict[str, Any]] = {
        "http": {"url": "http://127.0.0.1:1/score"},
        "llm_judge": {"base_url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "{{ response }}"},
        "reward_model": {"path": "/no/such"},
    }
    return SCORERS[kind].options.model_validate({**defaults.get(kind, {}), **values})


def needs(kind: str, **values: Any) -> list[tuple[str, str, str]]:
    """`where`, what and remedy of everything that is missing."""
    return [(error.where, error.what, error.remedy) for error in needs_of(options(kind, **values))]


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is installed; what was looked for."""
    asked: list[str] = []
    for module in (scorer_needs, external_needs):
        monkeypatch.setattr(module, "find_spec", lambda name: asked.append(name))
    return asked


def test_scorers_of_text_alone_need_nothing(no_packages: list[str]) -> None:
    for kind in ("math", "running_sum", "code"):
        assert needs(kind) == []
    assert no_packages == []


def test_package_that_is_missing_is_named_with_its_command(no_packages: list[str]) -> None:
    remedy = "pip install 'areal-like[reasoning-gym]'"
    assert needs("reasoning_gym") == [("", "the package reasoning-gym is not installed", remedy)]
    for kind in ("http", "llm_judge"):
        assert needs(kind) == [("", "the package `httpx2` is not installed", "pip install httpx2")]
    assert no_packages == ["reasoning_gym", "httpx2", "httpx2"]


def test_installed_package_is_no_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scorer_needs, external_needs):
        monkeypatch.setattr(module, "find_spec", lambda name: object())
    assert needs("reasoning_gym") == []
    assert needs("http") == []


def test_key_that_is_not_there_names_the_option_that_says_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    ((where, what, _),) = needs("http", key_env="NO_SUCH_KEY")
    assert where == "key_env"
    assert "NO_SUCH_KEY" in what
    ((where, what, _),) = needs("llm_judge", key_file=str(tmp_path / "none"))
    assert where == "key_file"
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "key").chmod(0o600)
    assert needs("http", key_file=str(tmp_path / "key")) == []


def test_folder_that_is_no_classifier_names_the_option(tmp_path: Path) -> None:
    ((where, what, _),) = needs("reward_model")
    assert (where, what) == ("path", "there is no folder /no/such")
    config = {"architectures": ["XForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    ((where, what, remedy),) = needs("reward_model", path=str(tmp_path))
    assert where == "label"
    assert "2 classes" in what
    assert remedy == "set label to one of bad, good"
    assert needs("reward_model", path=str(tmp_path), label="good") == []


def test_rubric_that_cannot_be_read_names_the_option(tmp_path: Path) -> None:
    ((where, _, _),) = needs("llm_judge", rubric=None, rubric_file=str(tmp_path / "none"))
    assert where == "rubric_file"
    (tmp_path / "rubric").write_text("{{ response }}")
    assert needs("llm_judge", rubric=None, rubric_file=str(tmp_path / "rubric")) == []


# ---------------------------------------------------------------- servers


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every connection is made; where to."""
    made: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        made.append(address)
        return socket.socket()

    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    return made


@pytest.mark.parametrize(
    ("kind", "url", "address"),
    [
        ("http", "http://host:8080/score", ("host", 8080)), ("http", "http://host/score", ("host", 80)),
        ("http", "https://host/score", ("host", 443)), ("llm_judge", "https://host/v1", ("host", 443)),
        ("llm_judge", "http://[::1]:9/v1", ("::1", 9)),
    ],
)  # fmt: skip
def test_server_is_looked_for_where_it_is_asked(kind: str, url: str, address: Any, connects: list[Any]) -> None:
    key = "url" if kind == "http" else "base_url"
    assert unreachable(options(kind, **{key: url})) is None
    assert connects == [address]


def test_scorers_without_a_server_connect_nowhere(connects: list[Any]) -> None:
    for kind in ("math", "reward_model"):
        assert unreachable(options(kind)) is None
    assert connects == []


@pytest.mark.parametrize(
    ("url", "bypassed", "looked_at"),
    [
        ("http://host/x", False, False), ("https://host/x", False, True), ("http://host/x", True, True),
        ("http://localhost/x", False, True), ("http://127.0.0.1/x", False, True), ("http://[::1]/x", False, True),
    ],
)  # fmt: skip
def test_server_behind_a_proxy_is_not_looked_for(
    url: str, bypassed: bool, looked_at: bool, connects: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://proxy:3128"})
    monkeypatch.setattr("urllib.request.proxy_bypass", lambda host: bypassed)
    assert unreachable(options("http", url=url)) is None
    assert bool(connects) == looked_at


@pytest.mark.parametrize(
    ("error", "words"), [(ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
                         (TimeoutError("timed out"), "timed out"), (UnicodeError("label too long"), "label too long")]
)  # fmt: skip
def test_nobody_listening_says_where_and_why(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: Any, timeout: float) -> None:
        assert 0 < timeout <= 10
        raise error

    monkeypatch.setattr("socket.create_connection", refuse)
    for kind, key in (("http", "url"), ("llm_judge", "base_url")):
        found = unreachable(options(kind))
        assert found is not None
        assert (found.where, found.what) == (key, f"cannot connect to 127.0.0.1:1 ({words})")


# ---------------------------------------------------------------- all scorers of a configuration


def test_needs_of_a_configuration_name_the_key_and_skip_scorers_that_run_elsewhere(no_packages: list[str]) -> None:
    scorers = [
        {"kind": "math"}, {"kind": "my.module:fn"}, {"kind": "reward_model", "options": {"path": "/no/such"}},
        {"kind": "reasoning_gym"}, {"kind": "math", "options": {"no_such": 1}},
    ]  # fmt: skip
    own = RewardSettings.model_validate({"scorers": scorers})
    assert [key for key, _, _ in missing(own)] == ["scorers.2.options.path", "scorers.3.kind"]
    elsewhere = RewardSettings.model_validate({"scorers": scorers, "addresses": ["tcp://127.0.0.1:1"]})
    assert list(missing(elsewhere)) == []


def test_silent_servers_of_a_configuration_name_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: Any, timeout: float) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("socket.create_connection", refuse)
    scorers = [{"kind": "math"}, {"kind": "http", "options": {"url": "http://127.0.0.1:1/"}}]
    ((key, what, remedy),) = silent_endpoints(RewardSettings.model_validate({"scorers": scorers}))
    assert key == "scorers.1.options.url"
    assert "127.0.0.1:1" in what
    assert remedy == "start the server first, or correct the address"


@pytest.mark.parametrize(
    ("config", "classes"),
    [
        ({}, ["LABEL_0", "LABEL_1"]), ({"num_labels": 3}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({"num_labels": 0}, ["LABEL_0", "LABEL_1"]), ({"num_labels": 1}, ["LABEL_0"]),
        ({"id2label": {"10": "c", "2": "b", "0": "a"}}, ["a", "b", "c"]),
        ({"id2label": {"x": "a"}}, ["LABEL_0", "LABEL_1"]),
        ({"id2label": {}, "num_labels": 1}, ["LABEL_0"]),
    ],
)  # fmt: skip
def test_classes_of_a_model_are_those_its_config_names_else_two(config: dict[str, Any], classes: list[str]) -> None:
    assert classifier_folder._classes(config) == classes


@pytest.mark.parametrize(
    ("label", "index"), [(0, 0), (1, 1), ("good", 1), (2, None), (-1, None), ("fine", None), (None, None)]
)
def test_class_is_found_by_number_or_name_and_must_be_said_where_there_are_several(label: Any, index: Any) -> None:
    if index is not None:
        assert classifier_folder._index_of(label, ["bad", "good"]) == index
    else:
        with pytest.raises(UserError, match=r"2 classes|no class") as raised:
            classifier_folder._index_of(label, ["bad", "good"])
        assert raised.value.where == "label"
    assert classifier_folder._index_of(None, ["only"]) == 0


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"kind": "openenv", "options": {"url": "http://127.0.0.1:8000"}}, ("127.0.0.1", 8000)),
        ({"kind": "openenv", "options": {"url": "wss://host"}}, ("host", 443)),
        ({"kind": "openenv", "options": {"url": "ws://host"}}, ("host", 80)),
        ({"kind": "openenv", "options": {"url": "nowhere"}}, None),  # its own message comes when it is loaded
        ({"kind": "openenv", "options": {"url": "http://host:99999"}}, None),
        ({"kind": "openenv", "options": {}}, None),
        ({"kind": "guess_number", "options": {"url": "http://host"}}, None),
    ],
)
def test_the_server_of_an_environment_is_looked_for(
    environment: dict[str, Any], address: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def refuse(address: Any, timeout: float) -> None:
        asked.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("socket.create_connection", refuse)
    found = list(silent_endpoints(RewardSettings.model_validate({"scorers": [], "environment": environment})))
    assert asked == ([] if address is None else [address])
    assert [key for key, _, _ in found] == ([] if address is None else ["environment.options.url"])
    elsewhere = {"scorers": [], "environment": environment, "addresses": ["tcp://127.0.0.1:1"]}
    assert list(silent_endpoints(RewardSettings.model_validate(elsewhere))) == []
