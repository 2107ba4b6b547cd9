"""What benchmarks have in common on their command lines: lists, a user's job, and where its result is written."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    async_vs_sync,
    folders,
    interruption,
    measured,
    modes,
    paired,
    quickstart,
    routing,
    runs,
    staleness,
    telemetry,
)  # fmt: skip
from benchmarks.measured import BOUNDS, INTEGERS, NUMBERS, TEXTS, add_job, add_options, parse_job
from benchmarks.paired import Comparison
from benchmarks.publishing import add_replace, result_path, words_of

LISTS = [
    ("async_vs_sync", "--floors"), ("async_vs_sync", "--bounds"), ("async_vs_sync", "--sequences"),
    ("async_vs_sync", "--seeds"), ("interruption", "--seeds"), ("interruption", "--shares"), ("staleness", "--seeds"),
    ("staleness", "--bounds"), ("staleness", "--tune"), ("divergence", "--seeds"), ("peer_trl", "--seeds"),
    ("peer_trl", "--rates"), ("quickstart", "--seeds"), ("quickstart", "--control-seeds"), ("delta", "--lrs"),
    ("controller", "--workers"), ("engine", "--slots"), ("weight_transfer", "--sizes"), ("preference", "--seeds"),
]  # fmt: skip


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])


@pytest.mark.parametrize(("benchmark", "option"), LISTS)
def test_a_list_that_is_none_is_one_sentence(benchmark: str, option: str, monkeypatch, capsys) -> None:
    call(monkeypatch, option, "x,1")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{benchmark}").main()
    assert ended.value.code == 2
    assert f"argument {option}: 'x,1': write " in capsys.readouterr().err


def test_seeds_of_a_comparison_that_are_none_are_one_sentence(monkeypatch, capsys) -> None:
    call(monkeypatch, "--seeds", "one")
    with pytest.raises(SystemExit):
        Comparison("modes", "mode", ("sync", "async")).main("")
    assert "'one': write whole numbers from 0, separated by commas" in capsys.readouterr().err


def test_a_list_has_at_least_one_value_each_of_its_kind() -> None:
    assert (INTEGERS("1,2"), NUMBERS("0.9,12"), TEXTS("5e-5"), BOUNDS("0,unbounded")) == (
        [1, 2], [0.9, 12.0], ["5e-5"], ["0", "unbounded"],
    )  # fmt: skip
    for kind, text in ((INTEGERS, ""), (INTEGERS, "1,"), (INTEGERS, "-1"), (INTEGERS, "unbounded"), (NUMBERS, "nan"),
                       (TEXTS, "low"), (BOUNDS, "")):  # fmt: skip
        with pytest.raises(argparse.ArgumentTypeError, match="separated by commas"):
            kind(text)


def job(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[str, list[str], Path]:
    call(monkeypatch, *words)
    parser = argparse.ArgumentParser()
    add_job(parser)
    add_options(parser)
    options = parse_job(parser)
    return options.config, options.overrides, result_path("speed", options)


def test_a_job_is_reported_in_the_same_words_everywhere(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(folders, "RESULTS", tmp_path)
    for words in (("my.yaml", "a=1", "b=2"), ("a=1", "my.yaml", "b=2"), ("--config", "my.yaml", "a=1", "b=2")):
        config, overrides, path = job(monkeypatch, *words, "--runs-dir", "/mine")
        assert (config, overrides, path) == ("my.yaml", ["a=1", "b=2"], Path("/mine/speed.json"))
    assert job(monkeypatch, "a=1", "--runs-dir", "/mine") == ("", ["a=1"], Path("/mine/speed.json"))
    assert job(monkeypatch) == ("", [], tmp_path / "speed.json")
    with pytest.raises(SystemExit):
        job(monkeypatch, "my.yaml", "--config", "other.yaml")
    assert "other.yaml and my.yaml: give one CONFIG" in capsys.readouterr().err


@pytest.fixture
def measuring_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every benchmark below with figures at once."""

    def summary(*_: Any, **__: Any) -> dict[str, Any]:
        return dict.fromkeys({*quickstart.KEYS, *paired.KEYS}, 1.0)

    def ways(place: str, config: str, seed: int, *_: Any) -> list[dict[str, Any]]:
        figures = dict.fromkeys(interruption.KEPT, 0.5)
        return [{"place": place, "way": way, "seed": seed, **figures} for way in interruption.WAYS]

    def points(_: Any, bounds: list[str], seeds: list[int], tuned: dict[str, Any]) -> list[dict[str, Any]]:
        figures = {"accuracy_after": 0.5, "samples_per_s": 1.0, "staleness_mean": 1.0, "ess": 1.0}
        return [{"seed": seed, "max_staleness": bound, "loss": loss, **figures}
                for seed in seeds for bound in bounds for loss in tuned]  # fmt: skip

    swept = {"key": "k", "value": "1", "seed": 1, **dict.fromkeys(staleness.KEYS, 1.0)}
    costs = {"cpu_ms": 1.0, "wall_ms": 1.0}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(interruption, "RESULT", tmp_path / "results" / "interruption.json")
    monkeypatch.setattr(measured, "train", summary)
    monkeypatch.setattr(interruption, "measure", ways)
    monkeypatch.setattr(staleness.Jobs, "measure", points)
    monkeypatch.setattr(staleness.Jobs, "tune", lambda *_: [])
    monkeypatch.setattr(staleness, "sweep", lambda *_: [swept])
    for name in ("emulate", "compare", "measure", "compare_real"):
        monkeypatch.setattr(routing, name, lambda *_, **__: [])
    monkeypatch.setattr(telemetry, "side_by_side", lambda arm, *_, **__: {"bare": costs, arm: costs})


@pytest.mark.processes
@pytest.mark.usefixtures("measuring_nothing")
@pytest.mark.parametrize("words", [["my.yaml"], ["--config", "my.yaml"], ["num_steps=5"], []], ids=" ".join)
@pytest.mark.parametrize("name", ["interruption", "staleness", "routing", "telemetry", "modes", "quickstart"])
def test_a_job_of_ones_own_leaves_the_published_result_alone(
    name: str, words: list[str], monkeypatch, tmp_path: Path
) -> None:
    if name == "quickstart" and "my.yaml" in words:
        pytest.skip("has no CONFIG")
    kept: list[Path | None] = []
    module = paired if name == "modes" else importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(module, "write", lambda question, command, result, path=None: kept.append(path))
    call(monkeypatch, *words, "--runs-dir", "mine")
    if name == "modes":
        Comparison("modes", "mode", ("sync", "async")).main(modes.__doc__)
    elif name == "telemetry":
        with pytest.raises(SystemExit, match="0"):
            module.main()
    else:
        module.main()
    assert set(kept) == {tmp_path / ("mine" if words else "results") / f"{name}.json"}


@pytest.mark.usefixtures("measuring_nothing")
def test_a_sweep_is_never_published(monkeypatch, tmp_path: Path) -> None:
    kept: list[Path | None] = []
    monkeypatch.setattr(staleness, "write", lambda question, command, result, path=None: kept.append(path))
    call(monkeypatch, "--sweep", "k=1", "--runs-dir", "mine")
    staleness.main()
    assert kept == [tmp_path / "mine" / "sweep.json"]


@pytest.mark.parametrize(
    ("made", "words", "is_published"),
    [
        ("--losses naive", "--losses naive", True),
        ("--losses naive --seeds 1,2", "--seeds=1,2 --losses naive --go-on", True),
        ("--losses naive", "--losses naive --seeds 1", False),
        ("--losses naive", "", False),
        ("", "--losses naive", False),
        ("", "--losses naive --replace", True),
        ("warm_start.sft.steps=200", "warm_start.sft.steps=200", True),
        ("", "my.yaml", False),
        ("", "my.yaml --replace", True),
    ],
)
def test_what_is_published_is_replaced_by_its_own_command_alone(
    made: str, words: str, is_published: bool, monkeypatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.setattr(folders, "RESULTS", tmp_path)
    (tmp_path / "speed.json").write_text(json.dumps({"command": f"python -m benchmarks.speed {made}".strip()}))
    call(monkeypatch, *words.split(), "--runs-dir", "/mine")
    parser = argparse.ArgumentParser()
    for option in ("--losses", "--seeds"):
        parser.add_argument(option)
    add_job(parser)
    add_options(parser)
    path = result_path("speed", parse_job(parser))
    assert path == (tmp_path if is_published else Path("/mine")) / "speed.json"
    assert ("--replace publishes it" in capsys.readouterr().out) != is_published


@pytest.mark.parametrize(
    "name", ["packing", "engine", "controller", "weight_transfer", "soak", "delta", "routing", "reward"]
)
def test_every_benchmark_whose_words_may_differ_can_publish(name: str, monkeypatch, capsys) -> None:
    call(monkeypatch, "--help")
    module = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit):
        module.main(*([["--help"]] if name == "packing" else []))
    assert "--replace" in capsys.readouterr().out


def test_a_call_without_runs_is_written_where_benchmarks_run(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "RESULTS", tmp_path)
    (tmp_path / "speed.json").write_text(json.dumps({"command": "python -m benchmarks.speed"}))
    call(monkeypatch, "thinking")
    parser = argparse.ArgumentParser()
    parser.add_argument("lengths")
    add_replace(parser)
    assert result_path("speed", parser.parse_args()) == tmp_path / "runs" / "benchmarks" / "speed.json"


def test_words_of_a_command_are_the_same_in_any_order() -> None:
    assert words_of("x --a=1 --b 2 key=3") == words_of("x key=3 --b=2 --a 1")
    assert words_of("x --a=1 key=3", ["--a"]) == words_of("x key=3")
    assert words_of("x --a 1 --b 2") != words_of("x --a 2 --b 1")
    assert words_of("x a=1 a=2") != words_of("x a=2 a=1"), "the last one holds"
    assert words_of("x --no-real mine.yaml") == words_of("x mine.yaml --no-real")


def test_devices_that_are_none_are_one_sentence(monkeypatch) -> None:
    for words, said in (
        ("--devices gpu", "give real, or emulated:GPU"),
        ("my.yaml --devices real", "it names its own"),
    ):
        call(monkeypatch, *words.split())
        with pytest.raises(SystemExit, match=said):
            interruption.main()


def publish_location(monkeypatch: pytest.MonkeyPatch, part: str, words: str) -> str:
    call(monkeypatch, *words.split(), "--runs-dir", "mine")
    return async_vs_sync.publish_location(part, async_vs_sync.parse()).parent.name


def test_a_published_part_is_replaced_by_its_own_command_alone(monkeypatch, tmp_path: Path) -> None:
    result = tmp_path / "results" / "async_vs_sync.json"
    result.parent.mkdir()
    made = {"command": "python -m benchmarks.async_vs_sync --devices real --sequences 64,16 --bounds 2,8 num_steps=40"}
    result.write_text(json.dumps({"parts": {"cores": made}}))
    monkeypatch.setattr(async_vs_sync, "RESULT", result)
    same = "--devices real --bounds 2,8 num_steps=40"
    for words in (same, f"--sequences 64 --go-on {same}", "--devices real --replace", "my.yaml --replace"):
        assert publish_location(monkeypatch, "cores", words) == "results", words
    for words in ("--devices real num_steps=40", f"{same} --seeds 1", f"{same} group_size=4", "--devices real"):
        assert publish_location(monkeypatch, "cores", words) == "mine", words
    assert publish_location(monkeypatch, "8 h800", "--model 7b --seeds 1") == "results", "nothing is lost"
    for words in ("my.yaml", "--model 7b num_steps=40"):
        assert publish_location(monkeypatch, "8 h800", words) == "mine", "a user's job"


def test_a_command_is_kept_without_where_its_result_goes(monkeypatch) -> None:
    call(monkeypatch, "--replace", "--seeds", "1", "--runs-dir", "mine", "--go-on", "--runs-dir=mine")
    assert runs.command_of("speed") == "python -m benchmarks.speed --seeds 1"
