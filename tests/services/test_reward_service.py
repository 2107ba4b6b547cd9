"""The reward service as a real process: every request gets one verdict, whatever a scorer does, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_harness import PATIENCE_S, Service, wait_until

from areal_like.verdict import Verdict
from areal_like.wire.encoding import encode
from areal_like.wire.messages import Shutdown
from services.processes.process_tree import living

pytestmark = pytest.mark.processes

NUM_PROCESSES = 3
SETTINGS: dict[str, Any] = {
    "scorers": [{"kind": "scorer_zoo:score"}],
    "num_workers": 2,
    "num_spares": 1,
    "timeout_s": 30.0,
    "retries": 1,
    "max_queue": 4,
    "cache_mb": 0,
    "max_memory_mb": 600,
}
HANG_S = 0.5


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"), SETTINGS)
    service.wait_full(NUM_PROCESSES)
    yield service
    service.close()
    assert service.process.returncode == 0, service.log


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "pids"
    path.touch()
    return path


def pids_in(note: Path) -> set[int]:
    return {int(line) for line in note.read_text().split()}


def overdue(service: Service, do: str, note: Path, num_notes: int) -> tuple[Verdict, set[int]]:
    """The verdict on a scorer that was ended at its deadline, and the processes it had started by then.

    How soon it has started them depends on the machine: the deadline grows until it had.
    """
    for deadline_s in (3 * HANG_S, 20 * HANG_S, 400 * HANG_S):
        note.write_text("")
        verdict = service.ask(do, deadline_s=deadline_s, note=str(note))
        pids = pids_in(note)
        if len(pids) >= num_notes:
            break
        assert not living(pids)
        assert_pool_recovers(service)
    return verdict, pids


def assert_pool_recovers(service: Service) -> None:
    service.wait_full(NUM_PROCESSES)
    assert service.ask("length", "abc").value == 3.0


def test_a_number_is_a_score(service: Service) -> None:
    verdict = service.ask("length", "four")
    assert (verdict.kind, verdict.value, verdict.attempts) == ("scored", 4.0, 1)
    assert verdict.components == {"scorer_zoo:score": 4.0}
    assert re.fullmatch("scorer_zoo:score@user-[0-9a-f]{12}", verdict.scorer)


def test_a_scorer_learns_how_the_answer_ended(service: Service) -> None:
    verdict = service.ask("info")
    assert verdict.components == {"scorer_zoo:score": 7.0, "scorer_zoo:score.stopped": 1.0}


def test_an_async_scorer_may_give_named_parts(service: Service) -> None:
    verdict = service.ask("async")
    assert verdict.value == 0.75
    assert verdict.components["scorer_zoo:score.style"] == 2.0


@pytest.mark.parametrize(
    ("do", "word"),
    [("nan", "nan"), ("infinite component", "inf"), ("text", "must be a number"), ("nothing", "must be a number")],
)
def test_what_is_no_finite_number_is_invalid_not_zero(service: Service, do: str, word: str) -> None:
    verdict = service.ask(do)
    assert (verdict.kind, verdict.value) == ("invalid", None)
    assert word in verdict.reason


def test_an_exception_costs_its_own_sample_and_says_its_last_line(service: Service) -> None:
    before = service.scoring_pids()
    verdict = service.ask("raise")
    assert verdict.kind == "crashed"
    assert verdict.attempts == 2
    assert "RuntimeError: the last line" in verdict.reason
    assert service.ask("exit").kind == "crashed"
    assert service.scoring_pids() == before


@pytest.mark.parametrize(("do", "word"), [("segfault", "SIGSEGV"), ("os._exit", "status 0")])
def test_a_scorer_that_kills_its_process_costs_one_request(service: Service, do: str, word: str) -> None:
    verdict = service.ask(do)
    assert verdict.kind == "crashed"
    assert word in verdict.reason
    assert "scorer_zoo:score" in verdict.reason
    assert_pool_recovers(service)


def test_an_overdue_process_is_killed_with_every_daemon_it_made(service: Service, note: Path) -> None:
    verdict, pids = overdue(service, "hang with daemons", note, 3)
    assert verdict.kind == "timed_out"
    assert "scorer_zoo:score" in verdict.reason
    assert len(pids) == 3
    assert not living(pids)
    assert_pool_recovers(service)


def test_a_burst_of_forks_is_killed_to_the_last_one(service: Service, note: Path) -> None:
    verdict, pids = overdue(service, "bomb", note, 64)
    assert verdict.kind == "timed_out"
    assert len(pids) >= 64
    assert not living(pids)
    assert_pool_recovers(service)


def test_a_hanging_scorer_does_not_stop_the_others(service: Service, note: Path) -> None:
    hanging = service.post("hang until the file is gone", deadline_s=PATIENCE_S, file=str(note))
    assert [service.ask("length", "x").kind for _ in range(5)] == ["scored"] * 5
    assert not service.replies[hanging], "the honest answers came while the other hung"
    note.unlink()
    assert service.verdict_of(hanging).is_scored


def test_more_hanging_requests_than_processes_are_all_killed(service: Service) -> None:
    hanging = [service.post("hang", deadline_s=HANG_S) for _ in range(SETTINGS["max_queue"])]  # all have room
    assert {service.verdict_of(request_id).kind for request_id in hanging} == {"timed_out"}
    assert_pool_recovers(service)


def test_a_process_left_behind_after_a_score_is_killed(service: Service, note: Path) -> None:
    verdict = service.ask("fork and return", note=str(note), num_notes=2)
    assert verdict.value == 0.5
    assert len(pids_in(note)) == 2
    assert not living(pids_in(note)), "the daemon went, and the process it came from"
    assert_pool_recovers(service)


def test_printing_does_not_damage_the_protocol_and_is_bounded_in_the_log(service: Service) -> None:
    before = service.log_path.stat().st_size
    assert service.ask("flood").value == 1.0
    assert service.ask("length", "abc").value == 3.0
    assert service.log_path.stat().st_size - before < 1_000_000


def test_a_megabyte_of_response_is_scored(service: Service) -> None:
    assert service.ask("length", "ab" * 500_000).value == 1e6


def test_a_response_of_a_hundred_megabytes_is_invalid_and_disturbs_nobody(service: Service) -> None:
    other = service.post("slow", seconds=0.5)
    verdict = service.ask("length", "x" * 100_000_000)
    assert (verdict.kind, verdict.attempts) == ("invalid", 1)
    assert "100000000 characters" in verdict.reason
    assert service.ask("length", "abc").value == 3.0
    assert service.verdict_of(other).is_scored
    wait_until(lambda: service.counters().get("invalid"), "its count")


def test_a_message_that_is_no_utf8_is_refused_counted_and_disturbs_nobody(service: Service) -> None:
    other = service.post("slow", seconds=0.5)
    before = service.counters().get("hub.rejected_malformed", 0.0)
    header, *rest = encode(service.request("length", "SPOILED"))
    service.send_frames([bytes(header).replace(b"SPOILED", b"\xff\xfe\x80abc\xff"), *rest])
    wait_until(lambda: service.counters().get("hub.rejected_malformed", 0.0) == before + 1, "the refusal")
    assert service.ask("length", "abc").value == 3.0
    assert service.verdict_of(other).is_scored
    assert "utf-8" in service.log.lower()


@pytest.mark.parametrize("do", ["memory", "bomb", "segfault", "fork and return"])
def test_the_others_are_scored_while_a_scorer_runs_wild(service: Service, do: str, note: Path) -> None:
    note.touch()
    wild = service.post(do, deadline_s=4 * HANG_S, note=str(note), num_notes=2)
    assert [service.ask("length", "x").value for _ in range(10)] == [1.0] * 10
    service.verdict_of(wild)
    assert_pool_recovers(service)


def test_an_unknown_scorer_is_invalid_and_a_known_part_is_scored_alone(service: Service) -> None:
    verdict = service.ask("length", scorer="judge")
    assert verdict.kind == "invalid"
    assert "judge" in verdict.reason
    assert service.ask("length", "ab", scorer="scorer_zoo:score").value == 2.0


def test_a_deadline_that_is_no_time_is_invalid(service: Service) -> None:
    assert service.ask("length", deadline_s=float("nan")).kind == "invalid"
    assert service.ask("length", deadline_s=-1.0).kind == "invalid"


def test_a_leak_past_the_limit_is_killed(service: Service) -> None:
    verdict = service.ask("memory")
    assert verdict.kind == "crashed"
    assert "max_memory_mb" in verdict.reason
    assert_pool_recovers(service)


def test_a_crash_is_tried_again_and_the_second_attempt_counts(service: Service, note: Path) -> None:
    verdict = service.ask("crash once", note=str(note))
    assert (verdict.value, verdict.attempts) == (0.25, 2)
    assert_pool_recovers(service)


def test_a_process_killed_in_mid_request_costs_one_attempt(service: Service, note: Path) -> None:
    request_id = service.post("slow", seconds=1.0, note=str(note))
    wait_until(lambda: pids_in(note), "the scorer to begin")
    os.kill(pids_in(note).pop(), signal.SIGKILL)
    verdict = service.verdict_of(request_id)
    assert (verdict.kind, verdict.attempts) == ("scored", 2)
    assert_pool_recovers(service)


def test_a_process_killed_idle_is_replaced(service: Service) -> None:
    killed = service.scoring_pids()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not killed & service.scoring_pids(), "their end")  # counted as alive until then
    assert_pool_recovers(service)


def test_a_duplicate_is_answered_once_while_it_runs_and_again_when_it_is_done(service: Service, note: Path) -> None:
    request = service.request("slow", seconds=0.3, note=str(note))
    for _ in range(3):
        service.send(request)
    service.verdict_of(request.request_id)
    assert service.ask("length", "later").is_scored
    assert len(service.replies[request.request_id]) == 1
    service.send(request)
    wait_until(lambda: len(service.replies[request.request_id]) == 2, "the remembered verdict")
    assert len(note.read_text().split()) == 1, "it was scored once"
    assert service.replies[request.request_id][0] == service.replies[request.request_id][1]


def test_a_client_that_starts_again_may_use_its_old_ids(service: Service) -> None:
    old, request = service.connect("worker", "first"), service.request("length", "old")
    service.send(request, old)
    assert service.verdict_of(request.request_id).value == 3.0
    new = service.connect("worker", "second")
    service.replies.clear()
    again = service.request("length", "newer")
    again = type(again)(**{f: getattr(again, f) for f in again.__struct_fields__} | {"request_id": request.request_id})
    service.send(again, new)
    assert service.verdict_of(request.request_id).value == 5.0


def test_the_queue_stays_within_its_bound_and_every_request_is_scored_or_refused(service: Service) -> None:
    service.longest_queue = 0.0
    service.refused.clear()
    asked = [service.post("slow", seconds=0.02) for _ in range(60)]
    wait_until(lambda: all(service.replies[one] or one in service.refused for one in asked), "an answer to each")
    scored = [request_id for request_id in asked if service.replies[request_id]]
    assert service.refused == {request_id: "full" for request_id in asked if request_id not in scored}
    assert len(scored) >= SETTINGS["max_queue"]
    assert service.refused, "sixty at once are more than two workers and a queue of four take"
    assert all(service.replies[request_id][0].is_scored for request_id in scored)
    assert service.longest_queue <= SETTINGS["max_queue"]


def test_heartbeats_carry_what_was_counted(service: Service) -> None:
    service.ask("length", "abc")
    service.ask("nan")
    wait_until(lambda: service.counters().get("invalid"), "a heartbeat")
    counters = service.counters()
    for name in ("queue", "scored", "timed_out", "crashed", "invalid", "busy_s", "score_p95_s", "queue_p95_s"):
        assert name in counters
    assert counters["scorer.scorer_zoo:score.answers"] >= 2


def test_a_row_without_the_field_a_scorer_needs_is_invalid_and_says_which(tmp_path: Path) -> None:
    service = Service(tmp_path, {"scorers": [{"kind": "math"}], "retries": 0})
    verdict = service.ask("math", r"\boxed{7}", question="7?")
    assert verdict.kind == "invalid"
    assert "answer" in verdict.reason
    assert verdict.failed_in == "math"
    assert service.ask("math", r"\boxed{7}", answer="7").value == 1.0
    service.close()


def test_slow_maths_is_ended_from_outside_and_the_next_answer_is_scored(tmp_path: Path) -> None:
    service = Service(tmp_path, {"scorers": [{"kind": "math"}], "retries": 0})
    for answer in (r"\sum_{k=1}^{10^{9}} \frac{1}{k^k}", r"\binom{10^{9}}{5 \cdot 10^{8}}"):
        verdict = service.ask("math", rf"\boxed{{{answer}}}", deadline_s=2 * HANG_S, answer="7")
        assert verdict.kind == "timed_out" or verdict.value == 0.0
        assert service.ask("math", r"\boxed{7.0}", answer="7").value == 1.0
    service.close()


def test_killing_the_service_leaves_no_process(tmp_path: Path, note: Path) -> None:
    service = Service(tmp_path, SETTINGS)
    service.wait_full(NUM_PROCESSES)
    service.post("hang", note=str(note))
    wait_until(lambda: pids_in(note), "the scorer to begin")
    pids = service.scoring_pids()
    assert len(pids) == NUM_PROCESSES
    service.process.kill()
    service.process.wait(PATIENCE_S)
    wait_until(lambda: not living(pids), "the end of all scoring processes")
    service.close()


@pytest.mark.parametrize("how", ["SIGTERM", "Shutdown"])
def test_stopping_answers_what_was_taken_and_exits_in_order(tmp_path: Path, how: str) -> None:
    service = Service(tmp_path, {**SETTINGS, "num_spares": 0})
    service.wait_full(2)
    asked = [service.post("slow", seconds=0.2) for _ in range(4)]
    service.verdict_of(asked[0])
    pids = service.scoring_pids()
    if how == "SIGTERM":
        service.process.terminate()
    else:
        service.hub.send("reward0", Shutdown(reason="the run is over", deadline_s=20.0))
    assert service.process.wait(PATIENCE_S) == 0, service.log
    assert all(service.verdict_of(request_id).is_scored for request_id in asked)
    assert not living(pids)
    service.close()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no_such_module:score", ["no_such_module", "cannot be imported", "ModuleNotFoundError"]),
        ("dies_on_import:score", ["dies_on_import", "signal SIGKILL"]),
    ],
)
def test_a_scorer_that_cannot_be_loaded_ends_the_service_as_the_users_mistake(
    tmp_path: Path, kind: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies_on_import.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.chdir(tmp_path)
    service = Service(tmp_path, {"scorers": [{"kind": kind}]}, wait=False, extra_path=tmp_path)
    assert service.process.wait(PATIENCE_S) == 2, service.log
    last = service.log.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert all(word in last for word in words), last
    service.close()
