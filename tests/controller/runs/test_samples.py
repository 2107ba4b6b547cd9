"""`areal-like samples`: the right samples with the right facts, from a ledger that is only looked at."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import io
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import run_zoo as zoo
from rich.console import Console

from areal_like.errors import UserError
from areal_like.trajectory import Segment
from controller.ledger.ledger import LedgerEntry
from controller.run_folder.run_folder import RunFolder
from controller.runs.sample_page import sample_page
from controller.runs.sample_rows import Choice, Sample, read_samples
from controller.runs.samples import samples
from rollout.transcript import Answer, Transcript


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Read by many tests, changed by none."""
    return zoo.make_sampled_run(tmp_path_factory.mktemp("runs"))


def names(folder: RunFolder, **choice: Any) -> list[str]:
    return [sample.name for sample in read_samples(folder, Choice(**choice)).samples]


def one(folder: RunFolder, name: str) -> Sample:
    return next(sample for sample in read_samples(folder, Choice(limit=None)).samples if sample.name == name)


def text_of(folder: RunFolder, width: int = 100, is_full: bool = False, **choice: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False)
    assert samples(folder, Choice(**choice), is_full=is_full, console=console) == 0
    return out.getvalue()


class TestChoice:
    def test_order_and_limit(self, sampled):
        assert names(sampled)[0] == "g3.0"
        assert names(sampled, order="worst") == ["g1.0", "g0.1", "g1.1", "g3.0", "g0.0"]
        assert names(sampled, order="best", limit=2) == ["g0.0", "g3.0"]

    def test_sample_without_a_score_is_neither_best_nor_worst(self, sampled):
        assert "g2.0" not in names(sampled, order="worst")
        assert "g2.0" in names(sampled)

    def test_step_and_group(self, sampled):
        assert names(sampled, step=2, order="given") == ["g1.0", "g1.1"]
        assert names(sampled, group=3) == ["g3.0"]
        assert names(sampled, step=1, group=1) == []

    def test_grep_looks_in_prompt_and_answer_whatever_the_case(self, sampled):
        assert names(sampled, grep="SAY") == ["g1.1"]
        assert names(sampled, grep="東京") == ["g1.1", "g0.1"]
        assert names(sampled, grep="the end", order="worst") == ["g1.0"]
        assert names(sampled, grep="nowhere") == []

    def test_step_or_group_that_is_not_there_says_what_is(self, sampled):
        with pytest.raises(UserError, match="steps 1 to 2"):
            names(sampled, step=3)
        with pytest.raises(UserError, match="groups 0 to 3"):
            names(sampled, group=4)

    def test_counts_tell_shown_from_there(self, sampled):
        found = read_samples(sampled, Choice(order="worst", limit=2))
        assert (len(found.samples), found.num_matching, found.num_stored) == (2, 5, 6)


class TestFacts:
    def test_everything_known_of_a_sample(self, sampled):
        sample = one(sampled, "g0.1")
        assert (sample.prompt, sample.answer) == ("<bos>2+2=", "東京 five")
        assert (sample.step, sample.staleness, sample.versions) == (1, 0, "0-1")
        assert (sample.reward, sample.components) == (0.25, {"correct": 0.25, "format": 1.0})
        assert (sample.finish_reason, sample.worker, sample.num_tokens) == ("stop", "rollout-0", 12)

    def test_staleness_is_of_the_group_in_the_step_that_used_it(self, sampled):
        assert one(sampled, "g1.0").staleness == 1
        assert one(sampled, "g3.0").staleness is None

    def test_answer_is_cut_where_new_weights_came_in(self, sampled):
        assert one(sampled, "g0.1").pieces == [(0, "東京"), (1, " five")]
        assert one(sampled, "g1.1").versions == "0-2"
        assert "".join(text for _, text in one(sampled, "g1.1").pieces) == zoo.NASTY

    def test_character_that_lies_across_a_cut_is_not_torn(self, tmp_path):
        folder = zoo.make_run(tmp_path)
        with zoo.open_ledger(folder) as ledger:
            zoo.fill_ledger(ledger)
            ledger.apply([zoo.sample_entry(3, 1, "東", 0.0, versions=[0, 1])])
        zoo.give_tokenizer(folder.final)
        assert one(folder, "g3.1").answer == "東"
        assert one(folder, "g3.1").pieces == []

    def test_what_is_out_of_the_ordinary_is_remarked(self, sampled):
        assert one(sampled, "g2.0").remarks() == [
            "no score: timed_out (after 10 s)", "its group was dropped (verdict_timed_out)", "left out of its group",
        ]  # fmt: skip
        assert one(sampled, "g3.0").remarks() == ["not yet used by a step"]
        assert one(sampled, "g0.0").remarks() == []


class TestPayloads:
    def test_purged_tokens_are_said_to_be_purged_and_the_facts_stay(self, tmp_path):
        folder = zoo.make_run(tmp_path)
        with zoo.open_ledger(folder, segment_bytes=1, keep_bytes=0) as ledger:
            zoo.fill_ledger(ledger)
            assert ledger.purge(1).num_samples > 0
        zoo.give_tokenizer(folder.final)
        sample = one(folder, "g0.0")
        assert (sample.payload, sample.reward, sample.prompt) == ("purged", 1.0, "")
        assert "no longer stored" in text_of(folder, group=0)
        assert one(folder, "g3.0").payload == "stored"

    def test_purge_while_we_read_is_a_purge(self, tmp_path):
        folder = zoo.make_sampled_run(tmp_path)
        for path in (folder.root / "segments").iterdir():
            path.unlink()
        assert {sample.payload for sample in read_samples(folder, Choice()).samples} == {"purged"}

    def test_damaged_record_costs_its_sample_only(self, tmp_path):
        folder = zoo.make_sampled_run(tmp_path)
        (path,) = (folder.root / "segments").iterdir()
        data = bytearray(path.read_bytes())
        data[20] ^= 0xFF
        path.write_bytes(data)
        found = {sample.name: sample.payload for sample in read_samples(folder, Choice()).samples}
        assert found.pop("g0.0") == "damaged"
        assert set(found.values()) == {"stored"}

    def test_without_a_tokenizer_prompts_are_numbers_and_answers_what_the_worker_wrote(self, tmp_path):
        folder = zoo.make_sampled_run(tmp_path)
        (folder.final / "tokenizer.json").unlink()
        found = read_samples(folder, Choice(group=0, order="given"))
        assert "tokenizer.json of the run was not found" in found.problems[0]
        assert found.samples[0].prompt.startswith("[5 tokens: 0 ")
        assert found.samples[0].answer == "four"

    @pytest.mark.parametrize("place", ["checkpoints/step_000002", "model"])
    def test_tokenizer_is_found_next_to_any_model_of_the_run(self, tmp_path, place):
        folder = zoo.make_sampled_run(tmp_path)
        (folder.final / "tokenizer.json").write_text("{")
        zoo.give_tokenizer(folder.root / place)
        found = read_samples(folder, Choice(group=0))
        assert found.samples[0].prompt == "<bos>2+2="
        assert "damaged" in found.problems[0]

    def test_tokenizer_of_the_starting_model_will_do(self, tmp_path):
        folder = zoo.make_sampled_run(tmp_path)
        (folder.final / "tokenizer.json").unlink()
        zoo.give_tokenizer(tmp_path / "prepared")
        spec = {"model": {"path": str(tmp_path / "prepared"), "tokenizer": "from_model"}}
        (folder.processes / "rollout-0.json").write_text(json.dumps(spec))
        assert one(folder, "g0.0").prompt == "<bos>2+2="


class TestLedger:
    def test_run_that_goes_on_is_read_while_it_writes(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        with zoo.open_ledger(folder) as ledger:
            zoo.fill_ledger(ledger)
            assert len(names(folder)) == 6
            ledger.apply([zoo.sample_entry(3, 1, "news", 0.0)])
            assert names(folder)[0] == "g3.1"

    def test_run_without_a_sample_says_so(self, tmp_path, capsys):
        folder = zoo.make_run(tmp_path, "running")
        with zoo.open_ledger(folder) as ledger:
            ledger.apply([LedgerEntry(effect=zoo.LINEAGE)])
            text_of(folder)
            assert "any finished samples yet" in capsys.readouterr().err
            with pytest.raises(UserError, match="no step has used a sample yet"):
                names(folder, step=1)
            with pytest.raises(UserError, match="no group has been drawn yet"):
                names(folder, group=0)

    def test_run_without_a_ledger_is_a_mistake_in_words(self, tmp_path):
        with pytest.raises(UserError, match="no ledger"):
            names(zoo.make_run(tmp_path))

    def test_newer_ledger_is_refused_in_words(self, tmp_path):
        folder = zoo.make_sampled_run(tmp_path)
        with sqlite3.connect(folder.ledger) as db:
            db.execute("UPDATE meta SET value = '9' WHERE key = 'schema'")
        with pytest.raises(UserError, match="schema version 9"):
            names(folder)

    @pytest.mark.parametrize("keep", [0, 1000, 6000])
    def test_damaged_ledger_is_refused_in_words(self, tmp_path, keep):
        folder = zoo.make_sampled_run(tmp_path)
        folder.ledger.write_bytes(folder.ledger.read_bytes()[:keep] + b"\xff" * 5000)
        with pytest.raises(UserError, match="cannot be read"):
            names(folder)

    def test_looking_leaves_nothing_behind(self, tmp_path):
        folder = zoo.make_sampled_run(tmp_path)
        before = {path: path.stat().st_mtime_ns for path in folder.root.rglob("*")}
        text_of(folder)
        assert {path: path.stat().st_mtime_ns for path in folder.root.rglob("*")} == before


class TestText:
    @pytest.mark.parametrize("width", [60, 80, 160])
    def test_fits_any_width(self, sampled, width):
        lines = text_of(sampled, width, limit=None).splitlines()
        assert max(map(len, lines)) <= max(width, 72), "the line of numbers needs 72 columns"

    def test_headline_says_what_is_shown_of_what_is_there(self, sampled):
        assert text_of(sampled, order="worst", limit=2).startswith("finished: 2 of 5 finished samples, worst first\n")

    def test_long_answer_keeps_beginning_and_end(self, sampled):
        short, full = text_of(sampled, group=1), text_of(sampled, group=1, is_full=True)
        assert "more characters; use --full]" in short
        assert "the end" in short
        assert full.count("x") > 3000
        assert short.count("x") < 1500

    def test_models_cannot_play_with_the_terminal(self, sampled):
        text = text_of(sampled, group=1)
        assert "\x1b[31m" not in text
        assert "\\x1b[31mred ünï 東京" in text

    def test_into_a_file(self, sampled, tmp_path, capsys):
        out = tmp_path / "samples.txt"
        samples(sampled, Choice(), out=str(out))
        assert "東京" in out.read_text()
        assert capsys.readouterr().out == f"samples: {out}\n"

    def test_file_that_cannot_be_written_is_a_mistake_in_words(self, sampled, tmp_path):
        with pytest.raises(UserError, match="--out"):
            samples(sampled, Choice(), out=str(tmp_path / "no" / "where.txt"))


@pytest.fixture
def forked(tmp_path: Path) -> RunFolder:
    """A run whose newest sample is an episode: a calculator's answer is given, and a fork and a sub-agent follow."""
    tokenizer = zoo.byte_tokenizer()

    def ids(text: str) -> np.ndarray:
        return np.asarray(tokenizer.encode(text).ids, np.int32)

    def answer(number: int, text: str, version: int) -> Answer:
        tokens = ids(text)
        logprobs, versions = np.full(len(tokens), -0.5, np.float32), np.full(len(tokens), version, np.int32)
        return Answer(segment=Segment(tokens, logprobs, versions), finish_reason="stop", number=number)

    main = Transcript(np.concatenate([[0], ids("2+2=")]))
    main.sampled(answer(0, "calc(", 0))
    main.given(ids("<b>4;"))
    fork = main.forked()
    main.sampled(answer(1, "four", 1))
    fork.sampled(answer(2, "five", 2))
    agent = Transcript(ids("help"))
    agent.sampled(answer(3, "no", 1))
    folder = zoo.make_run(tmp_path)
    with zoo.open_ledger(folder) as ledger:
        zoo.fill_ledger(ledger)
        entry = zoo.sample_entry(3, 1, "calc(4;four", 1.0)
        ledger.apply([msgspec.structs.replace(entry, trajectories=(main.close(), fork.close(), agent.close()))])
    zoo.give_tokenizer(folder.final)
    return folder


class TestEpisodes:
    def test_turns_of_all_trajectories_say_what_was_sampled_and_what_was_given(self, forked):
        sample = one(forked, "g3.1")
        assert (sample.num_turns, sample.num_trajectories) == (4, 3)
        assert sample.remarks()[0] == "4 turns in 3 trajectories"
        shown = [[(span.text, span.versions) for span in path.spans] for path in sample.trajectories]
        assert shown == [
            [("calc(", "0"), ("<b>4;", ""), ("four", "1")], [("five", "2")], [("help", ""), ("no", "1")],
        ]  # fmt: skip
        assert [(path.shared_with, path.num_shared) for path in sample.trajectories] == [(0, 0), (1, 15), (0, 0)]
        assert one(forked, "g0.0").trajectories == ()

    def test_terminal_and_page_show_them(self, forked):
        text = text_of(forked, group=3)
        assert "given   <b>4;" in text
        assert "sampled five" in text
        assert "trajectory 2 of 3 (stop), after 15 tokens as in trajectory 1" in text
        chosen = Choice(group=3)
        page = sample_page(forked, chosen, read_samples(forked, chosen))
        assert '<span class="given" title="given, not sampled">&lt;b&gt;4;</span>' in page
        assert 'data-mark="v2" title="sampled by version 2">five</span>' in page
        assert "trajectory 3 of 3 (stop)" in page

    def test_text_of_any_trajectory_is_found(self, forked):
        assert names(forked, grep="help") == ["g3.1"]

    def test_long_episodes_are_cut_unless_asked(self, forked, monkeypatch):
        monkeypatch.setattr("controller.runs.sample_text.MAX_SPANS", 2)
        assert "[... 1 more: --full]" in text_of(forked, group=3)
        assert "more: --full]" not in text_of(forked, group=3, is_full=True)

    def test_jsonl_has_the_spans(self, forked, capsys):
        samples(forked, Choice(group=3, order="given"), format="jsonl")
        row = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert row["trajectories"][0]["spans"][1] == {"text": "<b>4;", "versions": "", "source": ""}


class TestJsonl:
    def test_is_an_object_a_line_with_whole_texts(self, sampled, capsys):
        samples(sampled, Choice(step=2, order="given"), format="jsonl")
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["id"] for row in rows] == ["g1.0", "g1.1"]
        assert len(rows[0]["answer"]) == 3008
        assert rows[1]["answer"] == zoo.NASTY
        assert rows[1]["pieces"][0]["version"] == 0
        assert rows[0]["staleness"] == 1


class Reader(html.parser.HTMLParser):
    """Collects tags and the text of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


class TestPage:
    def page(self, folder: RunFolder, **choice: Any) -> str:
        chosen = Choice(limit=None, **choice)
        return sample_page(folder, chosen, read_samples(folder, chosen))

    def test_foreign_text_stays_text(self, sampled):
        page = self.page(sampled)
        reader = Reader()
        reader.feed(page)
        assert reader.tags.count("script") == 1, "its own"
        assert "b" not in reader.tags
        assert "&lt;b&gt;say" in page
        assert "<b>say</b>" in "".join(reader.texts)

    def test_needs_no_network_and_lets_no_other_script_run(self, sampled):
        page = self.page(sampled)
        assert not re.search(r"(src|href)=\"(?!data:)", page)
        assert "http" not in page.replace("http-equiv", "")
        script = page.split("<script>")[1].split("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in page.replace("&#39;", "'")

    def test_has_a_row_a_sample_with_marks_where_versions_change(self, sampled):
        page = self.page(sampled)
        assert page.count("<tr ") == 6
        assert 'title="sampled by version 2"' in page

    def test_without_samples_it_says_so(self, sampled):
        assert "No sample fits." in self.page(sampled, grep="nowhere")

    def test_goes_into_the_runs_folder_or_where_it_is_asked_for(self, tmp_path, capsys):
        folder = zoo.make_sampled_run(tmp_path)
        samples(folder, Choice(), format="html")
        assert capsys.readouterr().out == f"samples: {folder.root / 'samples.html'}\n"
        samples(folder, Choice(), format="html", out="-")
        assert capsys.readouterr().out.startswith("<!doctype html>")

    def test_very_long_text_is_cut_in_its_middle_unless_asked(self, tmp_path):
        folder = zoo.make_run(tmp_path)
        with zoo.open_ledger(folder) as ledger:
            zoo.fill_ledger(ledger)
            ledger.apply([zoo.sample_entry(3, 1, "y" * 30_000, 0.0)])
        chosen = Choice(group=3)
        found = read_samples(folder, chosen)
        assert "10,000 more characters" in sample_page(folder, chosen, found)
        assert "y" * 30_000 in sample_page(folder, chosen, found, is_full=True)


def test_ledger_path_with_odd_characters_is_opened(tmp_path):
    odd = Path(tmp_path / "a b?c#d%20")
    assert len(names(zoo.make_sampled_run(odd))) == 6
