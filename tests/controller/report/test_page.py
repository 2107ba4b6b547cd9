"""Claims about report.html as text: whole, closed in itself, and deaf to whatever a run says."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_run import HOSTILE, report_run, write_metrics, write_state

from areal_like.errors import UserError
from controller.report.answers import Answer, AnswerPair
from controller.report.page import PLOTLY, draw_report, script_json, write_report
from controller.run_folder.run_folder import RunFolder

pytestmark = pytest.mark.processes

VOID = {"meta", "link", "img", "br", "hr", "input"}
MAX_PAGE_MB = 2.0
PLOTLY_SHA256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
"""Of plotly-basic.min.js in plotly.js-basic-dist-min 4.1.1, as the npm registry has it."""


class Reader(HTMLParser):
    """Elements, their nesting, ids, links and texts; scripts apart."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.plain: list[str] = []
        self.faults: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.elements.append((tag, found))
        if "id" in found:
            self.ids.append(found["id"] or "")
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.words.append(data)
            if not {"pre", "code"} & set(self.open):  # the configuration, answers, and commands
                self.plain.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def payload(self) -> dict:
        return json.loads(self.scripts[0])


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> RunFolder:
    """A run with its page and its picture."""
    folder = report_run(tmp_path_factory.mktemp("runs"), "plain")
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(drawn) -> Reader:
    return read(drawn.root / "report.html")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Reader:
    """Its picture: test_picture.py."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out_the_picture(patch)
        return read(write_report(report_run(tmp_path_factory.mktemp("runs"), "a<b>&'\"", words=HOSTILE)))


@pytest.fixture
def undrawn(monkeypatch):
    """Without the picture: drawing is another test's business."""
    leave_out_the_picture(monkeypatch)


def leave_out_the_picture(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("controller.report.page.save", lambda figure, path: None)
    patch.setattr("controller.report.page.run_sheet", lambda *arguments: None)


def test_the_page_is_well_formed_and_its_ids_are_unique(page):
    assert not page.faults
    assert not page.open
    assert len(page.ids) == len(set(page.ids))


def test_every_link_of_the_page_leads_to_a_place_in_it(page):
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert len(links) > 10
    assert {link.removeprefix("#") for link in links} <= set(page.ids)
    assert all(link.startswith("#") for link in links)


def test_the_page_loads_nothing_and_forbids_every_request(page):
    assert not [attributes for _, attributes in page.elements if "src" in attributes]
    policy = next(attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';")
    assert "connect-src" not in policy


def test_the_verdict_stands_before_everything_else(page):
    headings = [tag for tag, _ in page.elements if tag in ("h1", "h2", "h3")]
    assert headings[0] == "h1"
    assert page.text.index("Do:") < page.text.index("samples/s")


def test_every_drawn_chart_has_its_data_and_every_datum_a_chart(page):
    drawn = {attributes["data-chart"] for _, attributes in page.elements if "data-chart" in attributes}
    assert drawn == set(page.payload["charts"])
    assert len(drawn) >= 20
    assert {strip["label"] for strip in page.payload["timeline"]["strips"]} >= {"rollout-0", "trainer", "reward"}


def test_each_wait_is_named_in_words(page):
    for words in ("wait:batch", "wait:score", "wait:work", "wait:requests", "trainer waits for batch n"):
        assert words in page.text


def test_nothing_a_run_says_becomes_markup_or_code(hostile, page):
    assert len(hostile.scripts) == len(page.scripts) == 3
    assert hostile.scripts[1:] == page.scripts[1:]
    assert not [tag for tag, _ in hostile.elements if tag == "img"]
    assert not [name for _, attributes in hostile.elements for name in attributes if name.startswith("on")]
    assert not hostile.faults


def test_what_a_run_says_is_shown_as_it_stands(hostile):
    assert "<img src=x onerror=alert(2)>" in hostile.text
    assert "{{ 7*7 }}" in hostile.text
    assert "\\u202e\\x07" in hostile.text
    assert "a<b>&'\"" in hostile.text


def test_names_in_charts_carry_no_tags(hostile):
    names = [series["name"] for chart in hostile.payload["charts"].values() for series in chart["series"]]
    assert any("script" in name for name in names)
    assert not [name for name in names if "<" in name or ">" in name]


def texts_in(value: object) -> Iterator[str]:
    """Texts of a payload, without the names under which they are sent."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


def recorded_names(folder: RunFolder) -> set[str]:
    """Names of fields and kinds that the files of a run have, where they are not words."""
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    found = {key for row in rows for key in row} | set(json.loads(folder.summary.read_text()))
    found |= set(json.loads(folder.state.read_text()))
    found |= {row[key] for row in rows for key in ("note", "reason") if isinstance(row.get(key), str)}
    return {name for name in found if re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+", name)}


def test_numbers_are_shown_with_words_and_never_under_the_name_of_their_field(tmp_path, undrawn):
    folder = report_run(tmp_path, "worded")
    page = read(write_report(folder))
    shown = " ".join([*page.plain, *texts_in(page.payload["charts"]), *texts_in(page.payload["timeline"])])
    names = recorded_names(folder)
    assert len(names) > 40
    assert {"reward_mean", "staleness_max", "samples_per_s", "worker_lost", "too_stale"} <= names
    assert sorted(name for name in names if re.search(rf"\b{name}\b", shown)) == []
    assert "worker lost" in shown
    assert "too stale" in shown


def test_the_script_that_draws_is_the_published_one():
    assert hashlib.sha256(PLOTLY.read_bytes()).hexdigest() == PLOTLY_SHA256
    assert "MIT License" in PLOTLY.with_name("LICENSE-plotly.txt").read_text()


def test_held_out_answers_of_the_first_and_the_newest_evaluation_are_shown_with_scores(page):
    assert "First held-out prompts 0+2= version 0: scored 0 it is 0 version 30: scored 1 it is 30" in page.text
    assert "1+2= version 0: no score it is 1 version 30: no score it is 31" in page.text
    assert "it is 10" not in page.text


def test_training_answers_are_shown_as_text_and_a_run_without_them_says_so(tmp_path, undrawn, page):
    assert "the ledger holds no text of a consumed sample" in page.text
    folder = report_run(tmp_path, num_steps=1, has_traces=False, has_ledger=False)
    pair = AnswerPair(
        "<b>7+5</b>=",
        [Answer.of("g3.1", 0.5, "</pre><script>alert(1)</script>\u202e"), Answer.of("g3.2", None, "x" * 5000)],
    )
    found = read(draw_report(folder, [pair])[0])
    assert "<b>7+5</b>= g3.1: scored 0.5 </pre><script>alert(1)</script>\\u202e g3.2: no score xxx" in found.text
    assert len(found.scripts) == 3
    assert "x" * 1199 + "…" in found.text
    assert not found.faults


def test_json_in_a_script_cannot_end_it():
    text = script_json({"a": "</script><!--\u2028&"})
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == {"a": "</script><!--\u2028&"}


def test_the_page_of_a_thousand_steps_stays_below_two_megabytes(tmp_path, undrawn):
    folder = report_run(tmp_path, num_steps=1000, num_workers=6)
    write_report(folder)
    assert (folder.root / "report.html").stat().st_size < MAX_PAGE_MB * 1e6


def test_the_picture_is_a_png_of_the_whole_sheet(drawn):
    head = (drawn.root / "report.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert int.from_bytes(head[16:20]) == 1700


def test_a_run_without_a_step_gives_a_page_that_says_what_is_missing(tmp_path):
    folder = report_run(tmp_path, num_steps=0, has_pulses=False, has_traces=False, has_ledger=False, status="failed")
    found = read(write_report(folder))
    for words in ("no step has been finished", "the run wrote no pulses", "no process has recorded its main activity"):
        assert words in found.text
    assert "failed" in found.text


def test_the_clock_of_events_starts_with_the_first_of_them(tmp_path):
    folder = report_run(tmp_path, num_steps=0, has_pulses=False, has_traces=False, has_ledger=False, status="stopped")
    write_metrics(folder, [{"kind": "sink", "time_s": 1.79e9, "sink": "tensorboard", "event": "closed"}])
    assert "0:00:00 metrics sink tensorboard is closed" in read(write_report(folder)).text


def test_workers_leaving_at_the_end_are_no_event(tmp_path):
    folder = report_run(tmp_path, num_steps=0, has_pulses=False, has_traces=False, has_ledger=False)
    words = "rollout-0 is lost (the run is over); 0 samples return to the queue"
    write_metrics(folder, [{"kind": "note", "time_s": 1.79e9, "note": "worker_lost", "text": words}])
    assert "no lost process, no dropped group, no note" in read(write_report(folder)).text


def test_a_folder_with_nothing_but_its_state_gives_a_page(tmp_path):
    folder = RunFolder.create(tmp_path, "new")
    write_state(folder, "running")
    found = read(write_report(folder))
    assert "crashed" in found.text
    assert "config.yaml is missing" in found.text


@pytest.mark.parametrize("damage", [b"", b"\x00\xff" * 500, b'{"kind":', b"[1, 2", b"null"], ids=repr)
@pytest.mark.parametrize("name", ["state.json", "config.yaml", "metrics.jsonl", "summary.json", "ledger.sqlite"])
def test_a_damaged_file_costs_only_what_stood_in_it(tmp_path, undrawn, name, damage):
    folder = report_run(tmp_path, num_steps=3)
    (folder.root / name).write_bytes(damage)
    found = read(write_report(folder))
    assert not found.faults
    assert (
        "Some files of this run are missing, incomplete or damaged" in found.text
        or name == "summary.json"
        or not damage
    )


def test_rows_of_strange_shapes_do_no_harm(tmp_path):
    folder = report_run(tmp_path, num_steps=0, has_pulses=False, has_traces=False, has_ledger=False)
    shapes = [{}, [], "x", None, 1e308, -1, {"a": [1]}]
    fields = ("staleness", "reward_mean", "wall_s", "ess", "time_s", "grad_norm", "version", "text", "note", "reason",
              "name", "sink", "event", "stage_s", "pause_s", "counts", "waits", "accuracy", "worker", "detail",
              "group_id", "written", "lost", "error")  # fmt: skip
    rows = []
    for number, shape in enumerate(shapes):
        process = {"role": shape, "counters": shape, "rss_mb": shape, "state": shape}
        row = {**dict.fromkeys(fields, shape), "step": number, "processes": {"reward": process, "rollout-0": shape}}
        kinds = ("step", "pulse", "note", "dropped", "process", "sink", "swap", "eval")
        rows += [{**row, "kind": kind} for kind in kinds]
    write_metrics(folder, rows)
    assert not read(write_report(folder)).faults


def test_a_run_of_a_newer_version_is_refused_and_nothing_written(tmp_path):
    folder = report_run(tmp_path, num_steps=1, has_traces=False, has_ledger=False)
    write_state(folder, "finished", format=99)
    with pytest.raises(UserError, match="newer version"):
        write_report(folder)
    assert not (folder.root / "report.html").exists()


def test_a_place_that_cannot_be_written_is_the_users_to_fix_and_leaves_nothing_behind(tmp_path):
    folder = report_run(tmp_path, num_steps=1, has_traces=False, has_ledger=False)
    (folder.root / "report.html").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        write_report(folder)
    assert not list(folder.root.glob(".*tmp"))


def test_reports_may_be_written_from_several_threads_at_once(tmp_path):
    folder = report_run(tmp_path, num_steps=2, has_traces=False, has_ledger=False)
    written: list[Path] = []
    threads = [threading.Thread(target=lambda: written.append(write_report(folder))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written == [folder.root / "report.html"] * 2
    assert not read(written[0]).faults
