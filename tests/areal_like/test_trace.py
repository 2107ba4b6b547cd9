"""Claims about the timeline."""

from __future__ import annotations

import itertools
import json
import threading
import tracemalloc
from pathlib import Path

from areal_like.config import TraceSettings
from areal_like.trace import MAX_LINE_BYTES, SHORT_S, Tracer, arrow_name, merge_traces


def events_of(run_dir: Path) -> list[dict]:
    return json.loads(merge_traces(run_dir).read_text())["traceEvents"]


def test_traces_of_all_processes_become_one_file(tmp_path: Path) -> None:
    rollout = Tracer(tmp_path / "logs" / "rollout-0.trace.jsonl", "rollout-0")
    trainer = Tracer(tmp_path / "logs" / "trainer.trace.jsonl", "trainer")
    with rollout.span("generate", "slot 3", tokens=7):
        rollout.arrow_start("g12.0", rollout.now_s(), "slot 3")
    start_s = trainer.now_s()
    trainer.complete("step", start_s, start_s + 2.0, step=1)
    trainer.arrow_end("g12.0", start_s + 1.0)
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


def test_trace_that_is_off_makes_no_file_and_costs_no_event(tmp_path: Path) -> None:
    tracer = Tracer.of(tmp_path, "trainer", TraceSettings())
    with tracer.span("step"):
        tracer.instant("x")
        tracer.counter("y", 1)
        tracer.arrow_end("g1.0", tracer.now_s())
    tracer.flush()
    tracer.close()
    assert not tracer.draws(0)
    assert list(tmp_path.iterdir()) == []
    assert tracer.num_dropped == 0


def test_bound_holds_for_a_process_and_its_successors_together(tmp_path: Path) -> None:
    for _ in range(5):
        tracer = Tracer.of(tmp_path, "rollout-0", TraceSettings(max_events=50))
        for number in range(40):
            tracer.counter("x", number)
        tracer.close()
    lines = (tmp_path / "logs" / "rollout-0.trace.jsonl").read_text().splitlines()
    assert sum('"ph":"C"' in line for line in lines) <= 50


def test_main_lane_goes_on_when_single_samples_have_used_their_share(tmp_path: Path) -> None:
    tracer = Tracer.of(tmp_path, "a", TraceSettings(max_events=100))
    for _ in range(300):
        tracer.complete("generate", 0.0, 1.0, "slot 1")
    for _ in range(20):
        tracer.complete("swap", 0.0, 1.0)
    tracer.close()
    names = [event["name"] for event in events_of(tmp_path) if event["ph"] == "X"]
    assert (names.count("generate"), names.count("swap")) == (75, 20)


def test_short_slices_of_the_main_lane_make_room_once_half_is_used(tmp_path: Path) -> None:
    tracer = Tracer.of(tmp_path, "a", TraceSettings(max_events=100))
    for k in range(200):
        tracer.complete("ledger", float(k), k + SHORT_S / 2)
    tracer.complete("ledger", 300.0, 301.0)
    tracer.close()
    slices = [event for event in events_of(tmp_path) if event["ph"] == "X"]
    assert len(slices) == 52
    assert slices[-1]["dur"] == 1_000_000


def test_same_groups_are_drawn_in_every_process(tmp_path: Path) -> None:
    settings = TraceSettings(max_events=10, every_group=4)
    drawn = [{g for g in range(40) if Tracer.of(tmp_path, name, settings).draws(g)} for name in ("a", "b")]
    assert drawn[0] == drawn[1] == set(range(0, 40, 4))


def test_samples_of_training_and_evaluation_have_names_of_their_own() -> None:
    assert arrow_name(12, 3) == "g12.3"
    assert arrow_name(12, 3, is_eval=True) == "e12.3"


def test_merging_holds_one_line_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "a.trace.jsonl").open("wb") as file:
        file.write(b'{"ph":"C","name":"x","ts":1}\n')
        file.write(b"0" * (3 * MAX_LINE_BYTES) + b"\n")
        file.write(b'{"ph":"C","name":"y","ts":2}\n' * 200_000)
    tracemalloc.start()
    try:
        merge_traces(tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert (tmp_path / "trace.json").stat().st_size > 5_000_000


def test_slices_that_touch_still_touch_in_a_reader_that_rounds(tmp_path: Path) -> None:
    tracer = Tracer.of(tmp_path, "a", TraceSettings(max_events=10_000))
    times = [1_795_230_759.083 + 0.000_317_7 * k for k in range(1000)]
    for start_s, end_s in itertools.pairwise(times):
        tracer.complete("x", start_s, end_s)
    tracer.close()
    slices = [event for event in events_of(tmp_path) if event["ph"] == "X"]
    assert all(isinstance(event["ts"], int) and isinstance(event["dur"], int) for event in slices)
    for before, after in itertools.pairwise(slices):
        assert before["ts"] + before["dur"] == after["ts"]


def test_arrow_has_an_id_that_perfetto_reads_and_a_name_that_people_do(tmp_path: Path) -> None:
    tracer = Tracer.of(tmp_path, "a", TraceSettings(max_events=100))
    for arrow in ("g12.3", "e12.3", "g123456789.511"):
        tracer.arrow_start(arrow, tracer.now_s())
    tracer.close()
    arrows = [event for event in events_of(tmp_path) if event["ph"] == "s"]
    assert [event["name"] for event in arrows] == ["g12.3", "e12.3", "g123456789.511"]
    ids = [int(event["id"], 16) for event in arrows]
    assert ids[0] == ids[1] == 12 << 20 | 3, "distinguished by their names"
    assert all(0 < found < 2**64 for found in ids)
