"""Lists of stages: what is read, and what is refused with its place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal_like.errors import UserError
from controller.preflight.dataset.registry import DEFAULT, STAGES, default_plan, make_stages, read_plan


def plan_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "stages.yaml"
    path.write_text(text)
    return path


def test_every_stage_is_in_the_module_of_its_name() -> None:
    needs = {"contamination": {"files": ("x",)}, "toxic": {"words": "x"}, "pass_rate": {"verdicts": "x"}}
    plan = default_plan()
    assert [one.kind for one in plan.stages] == list(DEFAULT)
    from controller.preflight.dataset.registry import StageSpec

    made = make_stages([StageSpec(kind, needs.get(kind, {})) for kind in STAGES])
    assert [stage.name for stage in made] == list(STAGES)


def test_names_options_and_columns_are_read(tmp_path: Path) -> None:
    text = "columns: {prompt: task, answer: null}\nstages:\n  - schema\n  - {kind: length, options: {min_prompt: 3}}\n"
    plan = read_plan(plan_of(tmp_path, text))
    assert plan.columns == {"prompt": "task", "answer": None}
    assert [(one.kind, dict(one.options)) for one in plan.stages] == [("schema", {}), ("length", {"min_prompt": 3})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: [schema, near_duplicate]", "there is no stage `near_duplicate` -> did you mean near_duplicates?"),
        ("stages:\n  - schema\n  - {kind: length, options: {min_promt: 3}}",
         "stages.yaml:3: length has no option `min_promt` -> did you mean min_prompt?"),
        ("stages:\n  - {kind: near_duplicates, options: {threshold: 2}}", "yaml:2: near_duplicates: threshold: "),
        ("stages: []", "`stages` must be a list of at least one stage"),
        ("stages: [{name: schema}]", "stages.yaml:1: the entry is not a valid stage"),
        ("steps: [schema]", "there is no key `steps`"),
        ("stages: [schema", "not valid YAML"),
        ("columns: [a]\nstages: [schema]", "`columns` must map roles to column names"),
        ("stages: ['nowhere:stage']", "module nowhere cannot be imported"),
        ("stages: ['json:JSONDecoder']", "json:JSONDecoder is not a stage"),
        ("stages: [toxic]", "toxic: set `words` to a file"),
        ("stages: [{kind: pass_rate, options: {verdicts: v, above: 0.9, below: 0.5}}]", "`above` must be less than"),
    ],
)  # fmt: skip
def test_a_wrong_list_is_one_sentence_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        make_stages(read_plan(plan_of(tmp_path, text)).stages)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from controller.preflight.dataset.registry import StageSpec

    monkeypatch.setitem(sys.modules, "rensa", None)
    (stage,) = make_stages([StageSpec("near_duplicates")])
    with pytest.raises(UserError, match=r"the package rensa is not installed -> pip install 'areal-like\[data\]'"):
        stage.prepare()
