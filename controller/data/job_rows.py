"""The data rows of a job, by draw. Each source of the configuration is read once.

Columns are interpreted in table.py; draws are made by the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from areal_like.red_team import RED_TEAM
from controller.config.curriculum_settings import CurriculumSettings
from controller.config.run_config import RunConfig
from controller.data.curriculum import Curriculum, RowOutcome
from controller.data.eval_layout import EvalLayout, SetSize
from controller.data.live import LiveOrder, load_training
from controller.data.mixing import Order, order_of
from controller.data.table import JoinedTable, Table, load_eval


@dataclass(frozen=True)
class Tables:
    """Tables read when the job was checked; None: not read yet."""

    train: Table | None = None
    eval: Table | None = None


@dataclass
class JobRows:
    """The data rows of a job, by draw."""

    train_table: Table | None
    order: Order | None
    eval_table: Table | None
    """Of all sets, one after the other."""
    layout: EvalLayout

    @staticmethod
    def load(
        config: RunConfig, *, needs_train: bool = True, tables: Tables | None = None, root: Path | None = None
    ) -> JobRows:
        """Read the sources of the configuration, unless they are in `tables`. root: folder of an existing run. Raises
        UserError."""
        known = tables or Tables()
        train_table = known.train or (load_training(config, root) if needs_train else None)
        eval_table = known.eval or load_eval(config)
        return JobRows(
            train_table,
            order_of(config, train_table) if train_table is not None else None,
            eval_table,
            _layout(config, eval_table),
        )

    def record_epochs(self, root: Path) -> None:
        """Record the epochs of a file that the run follows in its folder; nothing without `data.train.follow`."""
        if isinstance(self.order, LiveOrder):
            self.order.record_in(root)

    @property
    def num_final(self) -> int:
        """Answers of a whole evaluation."""
        return self.layout.num_final

    @property
    def num_periodic(self) -> int:
        """Answers of a periodic evaluation."""
        return self.layout.num_periodic

    @property
    def max_draws(self) -> int | None:
        """Draws before the data is used up; None: unlimited."""
        return self.order.max_draws if self.order is not None else 0

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the data, by key of the configuration; a resumed run must find the same."""
        tables = {"data.train": self.train_table, "data.eval": self.eval_table}
        found = {key: table.fingerprint for key, table in tables.items() if table is not None}
        return found | ({} if self.layout.num_samples == 1 else {"eval.num_samples": str(self.layout.num_samples)})

    def train(self, draw: int) -> Mapping[str, Any]:
        """The row of a draw."""
        assert self.train_table is not None
        assert self.order is not None
        return self.train_table[self.order.row_index(draw)]

    def source(self, draw: int) -> str:
        """Key of the set that the row of a draw belongs to: `data.train`, `data.mix.0`, ..."""
        assert self.train_table is not None
        assert self.order is not None
        return self.train_table.source(self.order.row_index(draw))

    def curriculum(
        self, settings: CurriculumSettings, *, seed: int, first: int, outcomes: Iterable[RowOutcome]
    ) -> Curriculum:
        """Make the curriculum for the draws from `first` on; outcomes: results of earlier draws."""
        assert self.order is not None
        return Curriculum(
            settings, row_of=self.order.row_index, num_rows=self.order.num_rows, seed=seed,
            max_draws=self.order.max_draws, first=first, outcomes=outcomes,
        )  # fmt: skip

    def eval(self, index: int) -> Mapping[str, Any]:
        """The row of an evaluation's answer."""
        assert self.eval_table is not None
        return self.eval_table[self.layout.table_row(index)]


def _layout(config: RunConfig, table: Table | None) -> EvalLayout:
    parts: Sequence[Table] = () if table is None else table.parts if isinstance(table, JoinedTable) else (table,)
    sizes = {}
    for name, part in zip(config.data.eval_sources, parts, strict=True):
        num_final = min(len(part), config.eval.final_prompts or len(part))
        sizes[name] = SetSize(len(part), num_final, min(num_final, config.eval.num_prompts or num_final))
    red_team = RED_TEAM if config.data.red_team is not None else None
    return EvalLayout(sizes, num_samples=config.eval.num_samples, red_team=red_team)


def refuse_changed(keys: Sequence[str]) -> None:
    """Raise UserError if rows differ from those that the run was started with; `keys` are their settings."""
    if keys:
        raise UserError(
            "the rows differ from the rows that the run was started with",
            where=", ".join(keys),
            remedy="restore the original rows, or start a new run",
        )
