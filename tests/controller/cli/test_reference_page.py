"""The reference page is the schema, and the committed page is the generated one."""

from __future__ import annotations

from pathlib import Path

from controller.cli.reference_page import reference_page
from controller.config.run_config import RunConfig
from controller.config.schema import knobs

COMMITTED = Path(__file__).parents[3] / "docs" / "reference.md"


def test_page_has_every_key_with_its_meaning() -> None:
    page = reference_page()
    for knob in knobs(RunConfig):
        assert f"| `{knob.leaf}` |" in page, knob.path
        assert knob.meaning.replace("|", "\\|") in page, knob.path


def test_sections_follow_the_schema() -> None:
    titles = [line[3:].strip("`") for line in reference_page().splitlines() if line.startswith("## ")]
    assert titles[0] == "Top level"
    assert {"data.train", "warm_start.sft.optimizer", "reward.scorers.[]", "trainer.loss.weight"} <= set(titles)
    assert len(titles) == len(set(titles))


def test_types_bounds_and_defaults_are_shown() -> None:
    lines = reference_page().splitlines()
    assert any(line.startswith("| `top_p` | number; > 0, <= 1 | `1` |") for line in lines)
    assert any(
        line.startswith("| `max_staleness` | whole number, `unbounded`; >= 0, <= 10000000 | `4` |") for line in lines
    )
    assert any(line.startswith("| `train` | section | required |") for line in lines)
    section = lines[lines.index("## `warm_start.sft.optimizer`") :]
    assert next(line for line in section if line.startswith("| `lr` |")).startswith("| `lr` | number; >= 0 | `0.002` |")


def test_tables_are_not_broken_by_their_own_content() -> None:
    for line in reference_page().splitlines():
        if line.startswith("| `"):
            assert line.replace("\\|", "").count("|") in (3, 5), line


def test_committed_page_is_up_to_date() -> None:
    assert COMMITTED.read_text() == reference_page(), "run: areal-like reference > docs/reference.md"
