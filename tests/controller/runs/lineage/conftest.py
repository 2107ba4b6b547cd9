"""A recorded run whose rows are in a file that is a cleaned set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_run import make_recorded_run

from controller.config.loading import load_config
from controller.data.origins import record_data
from controller.preflight.dataset.cleaning import CleaningJob
from controller.preflight.dataset.registry import Plan, StageSpec
from controller.run_folder.run_folder import RunFolder

NUM_ROWS = 7


def give_rows(folder: RunFolder, path: Path) -> None:
    folder.config.write_text(
        folder.config.read_text() + "name: recorded\nmodel: {init: {model_type: qwen3}, tokenizer: bytes}\n"
        f"data: {{train: {{path: {path}}}, shuffle: false}}\n"
    )
    record_data(load_config(str(folder.config)).config, folder.root)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Row N of seven is line N + 1 of raw.jsonl, whose first line is removed."""
    place = tmp_path_factory.mktemp("runs")
    rows = [{"prompt": "", "answer": "0", "id": "empty"}]
    rows += [{"prompt": f"What is {n} plus one?", "answer": str(n + 1), "id": f"r{n}"} for n in range(NUM_ROWS)]
    (place / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = Plan((StageSpec("schema"), StageSpec("exact_duplicates")))
    CleaningJob([str(place / "raw.jsonl")], plan, 1).clean(place / "clean")
    folder = make_recorded_run(place)
    give_rows(folder, place / "clean" / "rows.jsonl")
    return folder
