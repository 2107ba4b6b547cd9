"""Claims about the timeline."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from areal_like.trace import Tracer, merge_traces


def events_of(run_dir: Path) -> list[dict]:
    return json.loads(merge_traces(run_dir).read_text())["traceEvents"]


def test_traces_of_all_processes_become_one_file(tmp_path: Path) -> None:
    rollout = Tracer(tmp_path / "logs" / "rollout-0.trace.jsonl", "rollout-0")
    trainer = Tracer(tmp_path / "logs" / "trainer.trace.jsonl", "trainer")
    with rollout.span("generate", "slot 3", tokens=7):
        rollout.flow_start("12/0", "slot 3")
    start_s = trainer.now_s()
    trainer.complete("step", start_s, start_s + 2.0, step=1)
    trainer.flow_end("12/0")
    trainer.counter("staleness", 1.5)
    rollout.close()
    trainer.close()
    events = events_of(tmp_path)
    by_name = {event["name"]: event for event in events if event["ph"] == "X"}
    assert by_name["generate"]["args"] == {"tokens": 7}
    assert round(by_name["step"]["dur"]) == 2_000_000
    assert by_name["generate"]["pid"] != by_name["step"]["pid"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {"slot 3", "main"}
    start, end = (next(event for event in events if event["ph"] == phase) for phase in "sf")
    assert (start["id"], start["cat"], start["name"]) == (end["id"], end["cat"], end["name"])
    assert by_name["generate"]["ts"] <= start["ts"] <= by_name["generate"]["ts"] + by_name["generate"]["dur"]


def test_cut_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "logs" / "a.trace.jsonl", "a")
    tracer.counter("x", 1)
    tracer.close()
    with (tmp_path / "logs" / "a.trace.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"ph":"X","name":"cut","ts":12')
    merged = json.loads(merge_traces(tmp_path).read_text())
    assert [event["ph"] for event in merged["traceEvents"]] == ["M", "M", "C"]
    assert merged["otherData"]["broken_lines"] == 3


def test_run_without_traces_gives_an_empty_timeline(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert events_of(tmp_path) == []


def test_number_of_events_is_bounded_and_the_rest_counted(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "logs" / "a.trace.jsonl", "a", max_events=10)
    for number in range(25):
        tracer.counter("x", number)
    tracer.close()
    assert tracer.num_dropped == 15
    events = events_of(tmp_path)
    assert sum(event["ph"] == "C" for event in events) == 10
    assert events[-1]["args"] == {"labels": "15 events dropped"}


def test_span_is_recorded_when_its_code_raises(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "logs" / "a.trace.jsonl", "a")
    try:
        with tracer.span("doomed"):
            raise KeyError
    except KeyError:
        tracer.close()
    assert any(event["name"] == "doomed" for event in events_of(tmp_path))


def test_threads_may_share_a_tracer(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "logs" / "a.trace.jsonl", "a")

    def work(lane: str) -> None:
        for _ in range(1000):
            with tracer.span("x", lane):
                pass

    threads = [threading.Thread(target=work, args=(f"lane {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.close()
    assert sum(event["ph"] == "X" for event in events_of(tmp_path)) == 4000
