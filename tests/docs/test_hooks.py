"""The site's build hooks: what they put into pages, and what they refuse."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks.tables import TABLES

HOOKS = Path(__file__).resolve().parents[2] / "docs" / "hooks"


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_hook_{name}", HOOKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    (tmp_path / "docs" / "decisions").mkdir()
    return tmp_path


def test_what_was_not_measured_is_said_and_never_guessed(root: Path) -> None:
    text = hook("measured").section(root, "modes")
    assert "Not measured yet" in text
    assert "python -m benchmarks.modes" in text
    assert not any(character.isdigit() for character in text)


def test_a_result_becomes_a_table_with_its_command_and_machine(root: Path) -> None:
    row = {"process": "trainer", "minute_3_mb": 100.0, "end_mb": 101.25, "peak_mb": 102.0, "slope_mb_per_min": 0.25}
    result = {
        "date": "2026-01-02", "command": "python -m benchmarks.soak ", "machine": {"cpu": "Abacus", "cores": 2},
        "minutes": 8.0, "processes": [row, {**row, "process": "young", "minute_3_mb": None}],
    }  # fmt: skip
    (root / "benchmarks" / "results" / "soak.json").write_text(json.dumps(result))
    text = hook("measured").section(root, "soak")
    assert "| trainer | 100.0 | 101.2 | 102.0 | +0.25 |" in text
    assert "young" not in text
    assert "`python -m benchmarks.soak` on 2026-01-02: Abacus, 2 cores" in text


def test_places_are_filled_in_pages_below_the_top_as_well(root: Path) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="deep/page.md"))
    (root / "benchmarks" / "results" / "other.json").write_text(json.dumps({"command": "c"}))
    (root / "docs" / "pictures" / "other.svg").write_text("<svg/>")
    config = SimpleNamespace(docs_dir=str(root / "docs"))
    text = hook("measured").on_page_markdown("a\n<!-- measured: other -->\nb", page=page, config=config)
    assert "(../pictures/other.svg)" in text
    assert "<!--" not in text


def test_every_case_of_the_gpu_suite_is_shown_with_how_it_ended() -> None:
    rows = [
        {"table": "engine", "case": "0.6B", "status": "ok", "tokens_per_s": 12345.6, "share": 0.4321},
        {"table": "engine", "case": "4B", "status": "skipped", "reason": "no | memory"},
    ]
    text = TABLES["gpu_suite"]({"parts": {"engine": {"rows": rows}}})
    assert "| 0.6B | 12,346 | 0.432 |  |" in text
    assert "| 4B (skipped) |  |  | no \\| memory |" in text


IMAGE = '<p><img alt="A &quot;plot&quot;" src="../pictures/plot.svg" /></p>'


def inlined(root: Path, svg: str, warnings: list[str]) -> str:
    pytest.importorskip("mkdocs")
    module = hook("pictures_inline")
    module.log = SimpleNamespace(warning=warnings.append)
    (root / "docs" / "pictures" / "plot.svg").write_text(svg)
    return str(module.on_page_content(IMAGE, page=None, config=SimpleNamespace(docs_dir=str(root / "docs"))))


def test_a_picture_is_put_into_the_page(root: Path) -> None:
    warnings: list[str] = []
    text = inlined(root, '<?xml version="1.0"?>\n<svg class="system"><g/></svg>', warnings)
    assert '<svg class="system"><g/></svg>' in text
    assert "<?xml" not in text
    assert 'aria-label="A &quot;plot&quot;"' in text
    assert not warnings


def test_a_plot_of_another_result_file_is_refused(root: Path) -> None:
    result = root / "benchmarks" / "results" / "plot.json"
    result.write_text("{}")
    mark = hashlib.sha256(b"{}").hexdigest()[:16]
    warnings: list[str] = []
    inlined(root, f'<svg data-made-from="plot.json {mark}"/>', warnings)
    assert not warnings
    result.write_text('{"measured": "again"}')
    inlined(root, f'<svg data-made-from="plot.json {mark}"/>', warnings)
    assert "draw it again" in warnings[0]


@pytest.mark.parametrize("picture", sorted((HOOKS.parent / "pictures").glob("*.svg")), ids=lambda path: path.stem)
def test_every_committed_plot_was_drawn_from_its_committed_result(picture: Path) -> None:
    pytest.importorskip("mkdocs")
    module = hook("pictures_inline")
    warnings: list[str] = []
    module.log = SimpleNamespace(warning=warnings.append)
    module._refuse_old(picture.stem, picture.read_text(), HOOKS.parents[1] / "benchmarks" / "results")
    assert not warnings


def test_make_check_builds_the_documentation() -> None:
    rules = (HOOKS.parents[1] / "Makefile").read_text().splitlines()
    check = rules.index("check:")
    assert any("$(MAKE)" in line and line.endswith(" static") for line in rules[check + 1 : check + 3])
    assert "docs" in next(line for line in rules if line.startswith("static:")).split()
    build = rules[next(index for index, line in enumerate(rules) if line.startswith("docs:")) + 1]
    assert build.endswith("mkdocs build --strict")


def test_long_names_may_break_in_tables_alone() -> None:
    name = "rollout.engine.max_context"
    page = f"<p><code>{name}</code></p><table><tr><td><code>{name}</code> <code>a.b_c</code></td></tr></table>"
    text = hook("soft_breaks").on_page_content(page)
    assert "<code>rollout.<wbr>engine.<wbr>max_<wbr>context</code> <code>a.b_c</code>" in text
    assert text.count("<wbr>") == 3


def test_every_decision_is_listed_by_number(root: Path) -> None:
    for name, title in (("0002-b.md", "# 0002: second"), ("0001-a.md", "# 0001 First")):
        (root / "docs" / "decisions" / name).write_text(f"{title}\n\nText")
    config = SimpleNamespace(docs_dir=str(root / "docs"))
    text = hook("decisions_list").on_page_markdown("<!-- decisions -->", config=config)
    assert text.splitlines() == ["- [0001 First](0001-a.md)", "- [0002: second](0002-b.md)"]


def test_the_index_for_language_models_has_every_page_of_the_navigation(tmp_path: Path) -> None:
    made = hook("llms_text")
    page = tmp_path / "data.md"
    page.write_text("# Data\n\n```yaml\na: 1\n```\n\n`data.train` reads [rows](rows.md) of **yours**. More follows.\n")
    empty = tmp_path / "empty.md"
    empty.write_text("# Empty\n")

    def leaf(title: str, path: Path, url: str) -> SimpleNamespace:
        file = SimpleNamespace(content_string=path.read_text())
        return SimpleNamespace(is_section=False, title=title, url=url, file=file)

    inner = SimpleNamespace(is_section=True, title="API", children=[leaf("Empty", empty, "api/empty/")])
    section = SimpleNamespace(is_section=True, title="Guides", children=[leaf("Data", page, "data/"), inner])
    config = SimpleNamespace(site_name="site", site_description="what it is", site_dir=str(tmp_path))
    made.on_nav(SimpleNamespace(items=[section]), config=config, files=None)
    made.on_post_build(config=config)
    assert (tmp_path / "llms.txt").read_text() == (
        "# site\n\n> what it is\n\n## Guides\n\n"
        "- [Data](data/): data.train reads rows of yours.\n"
        "- [Empty](api/empty/)\n"
    )
