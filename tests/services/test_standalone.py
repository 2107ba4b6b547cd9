"""Claims about the command lines of a service by hand: which settings it takes, what `status` and `keys` say."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import OperationError, UserError
from areal_like.wire.messages import SHARED_RUN, StatsReply
from services.reward import standalone
from services.reward.config import scorer_names
from services.reward.standalone import main, page, read_settings

ADDRESS = "tcp://127.0.0.1:7000"


def written(folder: Path, content: Any) -> Path:
    path = folder / "rewards.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


# ---------------------------------------------------------------- settings


def test_settings_are_a_file_of_their_own_or_a_section_of_a_run_config(tmp_path: Path) -> None:
    section = {"scorers": [{"kind": "running_sum"}], "num_workers": 3}
    for content in (section, {"reward": section}, {"reward": section, "trainer": {"precision": "bfloat16"}}):
        settings = read_settings(written(tmp_path, content))
        assert (scorer_names(settings.scorers), settings.num_workers) == (["running_sum"], 3)


@pytest.mark.parametrize(
    ("content", "what", "remedy"),
    [
        ("a: [", "cannot be read", ""),
        ("- 1\n", "has no `reward` section", "reward: {scorers: [{kind: math}]}"),
        ({"reward": [1]}, "has no `reward` section", "reward: {scorers"),
        ({"reward": {"num_workers": 0}}, "reward.num_workers: ", "docs/reference.md"),
        ({"reward": {"scorers": [{"kind": "math", "weight": "x"}]}}, "reward.scorers.0.weight: ", "docs/reference.md"),
        ({"reward": {"num_wrokers": 1}}, "there is no key `reward.num_wrokers`", "did you mean num_workers?"),
        ({"reward": {"zzz": 1}}, "there is no key `reward.zzz`", "docs/reference.md"),
        (
            {"reward": {"addresses": [ADDRESS]}},
            "reward.addresses has no effect on a standalone service",
            "remove this key",
        ),
        ({"reward": {"curve_dir": "/k"}}, "reward.curve_dir has no effect on a standalone service", "remove this key"),
        ({"reward": {"ask_for": "math"}}, "reward.ask_for has no effect on a standalone service", "remove this key"),
        (
            {"reward": {"scorers": [{"kind": "code", "options": {"total_limit_s": 60}}]}},
            "60 s for a program is more than reward.timeout_s 30 allows",
            "set timeout_s to 61.5 or more, or reduce total_limit_s",
        ),
    ],
)
def test_settings_that_cannot_work_are_one_sentence_about_the_file_or_key(
    content: Any, what: str, remedy: str, tmp_path: Path
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(UserError) as raised:
        read_settings(path)
    error = raised.value
    assert what in error.what
    assert error.where in (str(path), "reward.scorers.0.options.total_limit_s")
    assert remedy in error.remedy
    assert bool(error.remedy) == bool(remedy)


def test_file_that_is_not_there_is_said_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read \(.*No such file"):
        read_settings(tmp_path / "none.yaml")


# ---------------------------------------------------------------- serve


def test_service_stands_in_a_realm_of_its_own_with_the_arguments_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []

    class FakeServer:
        def __init__(self, spec: Any, settings: Any, on_address: Any) -> None:
            made.append((spec, settings))
            self.on_address = on_address

        async def run(self, stop: asyncio.Event) -> None:
            self.on_address("tcp://127.0.0.1:12345")

    monkeypatch.setattr(standalone, "RewardServer", FakeServer)
    calls: list[Any] = []
    for name in ("limit_threads", "start_logging", "prefer_installation", "check_not_shadowed"):
        monkeypatch.setattr(standalone, name, lambda *arguments, name=name: calls.append((name, *arguments)))
    masks: list[int] = []
    monkeypatch.setattr("os.umask", lambda mask: masks.append(mask) or 0)
    keys = tmp_path / "keys"
    arguments = ["--bind", "tcp://127.0.0.1:7", "--name", "mine", "--curve-dir", str(keys), "--silence-s", "3"]
    assert main(["serve", "--config", str(written(tmp_path, {"num_workers": 2})), *arguments]) == 0
    ((spec, settings),) = made
    assert (spec.name, spec.run_id, spec.bind_address) == ("mine", SHARED_RUN, "tcp://127.0.0.1:7")
    assert (spec.curve_dir, spec.silence_s, spec.hub_address, spec.run_dir) == (keys, 3.0, "", None)
    assert settings.num_workers == 2
    assert capsys.readouterr().out == "tcp://127.0.0.1:12345\n"
    assert (keys / "server.secret").exists(), "keys are made where there are none"
    assert {"limit_threads", "start_logging", "prefer_installation", "check_not_shadowed"} == {one[0] for one in calls}
    assert ("limit_threads", 1) in calls
    assert ("start_logging", "mine") in calls
    assert masks[:1] == [0o077], "what it writes is for its user alone"
    secret = (keys / "server.secret").read_bytes()
    assert main(["serve", "--config", str(tmp_path / "rewards.yaml"), *arguments]) == 0
    assert (keys / "server.secret").read_bytes() == secret, "and used where there are some"


def test_mistake_is_the_exit_status_of_a_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: ")


# ---------------------------------------------------------------- status


def stats(**more: Any) -> StatsReply:
    facts: dict[str, Any] = {
        "request_id": "q", "name": "reward0", "pid": 42, "state": "score", "uptime_s": 1234.5, 
        "label": "math@1 + code@2",
        "scorers": ("math", "a_long_name"), "num_workers": 4, "counters": {
            "processes": 5.0, "busy_workers": 3.0, "pool.started": 1007.0, "pool.killed_overdue": 11.0,
            "pool.killed_memory": 12.0, "pool.died_busy": 13.0, "queue": 14.0, "refused_full": 15.0,
            "refused_draining": 16.0, "duplicates": 17.0, "scored": 18.0, "timed_out": 19.0, "crashed": 20.0,
            "invalid": 21.0, "retries": 22.0, "cache.hits": 23.0, "cache.misses": 24.0, "cache.entries": 25.0,
            "cache.bytes": 1.5 * 2**20, "queue_p50_s": 0.1, "queue_p95_s": 0.2, "queue_p99_s": 0.3, "score_p50_s": 1.1,
            "score_p95_s": 1.2, "score_p99_s": 1.3, "scorer.math.p50_s": 2.1, "scorer.math.p95_s": 2.2,
            "scorer.math.p99_s": 2.3, "scorer.math.answers": 30.0, "scorer.math.timed_out": 1.0,
            "scorer.math.crashed": 2.0, "scorer.math.invalid": 4.0,
        },
    }  # fmt: skip
    return StatsReply(**{**facts, **more})


def test_page_shows_every_number_under_its_own_name() -> None:
    shown = page(ADDRESS, stats())
    assert shown.endswith("\n")
    lines = shown.splitlines()
    assert lines[0] == f"{ADDRESS}: score, reward0 (process 42), up 1,234 s"
    assert lines[1].split() == ["scorers", "math@1", "+", "code@2"]
    text = " ".join(shown.split())
    assert "processes 5 ready, 3 of 4 busy, 1,007 started, 11 killed overdue, 12 for memory, 13 died" in text
    assert "queue 14 waiting; 15 refused when full, 16 when draining; 17 requested twice" in text
    assert "verdicts 18 scored, 19 timed_out, 20 crashed, 21 invalid; 22 retries" in text
    assert "cache 23 hits, 24 misses, 25 scores in 1.5 MB" in text
    assert "seconds p50 p95 p99 answers failed queueing 0.1000 0.2000 0.3000 scoring 1.1000 1.2000 1.3000" in text
    assert "math 2.1000 2.2000 2.3000 30 7" in text
    assert "a_long_name 0.0000 0.0000 0.0000 0 0" in text


def test_columns_of_the_page_stand_below_their_titles() -> None:
    shown = page(ADDRESS, stats()).splitlines()
    title = next(line for line in shown if "p95" in line)
    for number in ("0.1000", "1.1000", "2.1000"):
        (line,) = [line for line in shown if number in line]
        assert line.index(number) + len(number) == title.index("p50") + len("p50")
    (after,) = [index for index, line in enumerate(shown) if line.strip() == "a_long_name"]
    assert shown[after + 1].index("0.0000") + 6 == title.index("p50") + 3, "a long name has a line of its own"


def answering(monkeypatch: pytest.MonkeyPatch, *gone: str) -> list[dict[str, Any]]:
    """`ask_stats` answers for every address but these; returns what it is asked."""
    asked: list[dict[str, Any]] = []

    async def ask_stats(address: str, **more: Any) -> StatsReply:
        asked.append({"address": address, **more})
        if address in gone:
            raise OperationError("nobody answers")
        return stats()

    monkeypatch.setattr(standalone, "ask_stats", ask_stats)
    return asked


def test_status_of_an_address_asks_in_the_shared_realm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = answering(monkeypatch)
    assert main(["status", ADDRESS, "--curve-dir", str(tmp_path), "--timeout-s", "2.5"]) == 0
    assert asked == [{"address": ADDRESS, "curve_dir": tmp_path, "run_id": SHARED_RUN, "timeout_s": 2.5}]
    assert capsys.readouterr().out == page(ADDRESS, stats())
    assert main(["status", ADDRESS]) == 0
    assert asked[1]["curve_dir"] == standalone.service_keys_folder()


def test_status_goes_on_after_a_service_that_does_not_answer_and_fails_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, ADDRESS)
    assert main(["status", ADDRESS, "tcp://127.0.0.1:2"]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"{ADDRESS} is unreachable: nobody answers"
    assert others[0].startswith("tcp://127.0.0.1:2: score")


def test_status_as_json_is_one_object_per_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, ADDRESS)
    assert main(["status", "--json", ADDRESS, "tcp://127.0.0.1:2"]) == 1
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == {"address": ADDRESS, "state": "unreachable", "reason": "nobody answers"}
    assert (second["address"], second["state"], second["counters"]["scored"]) == ("tcp://127.0.0.1:2", "score", 18.0)


def test_status_of_a_run_asks_each_of_its_services_with_the_runs_own_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spec(name: str, bind_address: str | None) -> None:
        (tmp_path / "processes").mkdir(exist_ok=True)
        ProcessSpec(
            role="reward", name=name, run_id="the-run", run_dir=str(tmp_path), hub_address="tcp://127.0.0.1:1",
            bind_address=bind_address, parent_pid=1, seed=1, model=ModelSettings(), sampling=SamplingSettings(),
            staleness=StalenessSettings(), groups_per_step=1, group_size=1, num_steps=1, weight_dir=str(tmp_path),
            curve_dir=str(tmp_path / "keys"), settings={},
        ).save(tmp_path / "processes" / f"{name}.json")  # fmt: skip

    asked = answering(monkeypatch)
    assert main(["status", str(tmp_path)]) == 2, "a folder without services"
    spec("reward1", "tcp://127.0.0.1:11")
    spec("reward0", "tcp://127.0.0.1:10")
    spec("reward2", None)
    assert main(["status", str(tmp_path)]) == 0
    assert [(one["address"], one["run_id"], one["curve_dir"]) for one in asked] == [
        ("tcp://127.0.0.1:10", "the-run", tmp_path / "keys"), ("tcp://127.0.0.1:11", "the-run", tmp_path / "keys"),
    ]  # fmt: skip


# ---------------------------------------------------------------- keys


def test_keys_are_made_once_and_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{folder}: keys of the service")
    assert str(standalone.service_keys_folder()) in shown
    before = (folder / "server.secret").read_bytes()
    assert stat.S_IMODE((folder / "server.secret").stat().st_mode) == 0o600
    assert main(["keys", str(folder)]) == 2
    assert "already contains keys" in capsys.readouterr().err
    assert (folder / "server.secret").read_bytes() == before


def test_service_says_whether_it_made_its_keys_or_found_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert standalone._made_keys(tmp_path / "keys") == standalone._made_keys(tmp_path / "keys")
    made, found = [record.getMessage() for record in caplog.records]
    assert (made.split(" keys ")[0], found.split(" keys ")[0]) == ("created", "using")
