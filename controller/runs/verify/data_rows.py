"""Finds the data row of a draw, if the data that a run's configuration names can still be read and is the same."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from areal_like.errors import OperationError, UserError
from controller.config.loading import load_config
from controller.data.cleaned_rows import as_recorded
from controller.data.live import load_training
from controller.data.mixing import Order, order_of
from controller.data.table import Table
from controller.run_folder.run_folder import RunFolder


class DataRows(NamedTuple):
    """Rows of a run, by draw."""

    table: Table
    order: Order

    def where(self, draw: int) -> str:
        """Location of the row of a draw, such as train.jsonl:12."""
        return self.table.where(self.order.row_index(draw))

    def source(self, draw: int) -> str:
        """Key of the set that the row of a draw belongs to."""
        return self.table.source(self.order.row_index(draw))


def read_rows(folder: RunFolder) -> tuple[DataRows | None, str]:
    """Read the rows of a run; otherwise None, and why. Nothing is fetched and no code of the user is called."""
    try:
        config = load_config(str(folder.config)).config
        sources = [as_recorded(config, folder.root).data.train, *config.data.mix]
        if any(source.kind == "dataset" or ":" in (source.generator or "") for source in sources):
            return None, "its data is a Hugging Face dataset, or made by your own code"
        if any(source.path is not None and not Path(source.path).is_absolute() for source in sources):
            started_in = folder.read_state().get("started_in")
            if started_in is not None and Path(started_in).resolve() != Path.cwd():
                return None, f"the paths of its data are relative to {started_in}"
        table = load_training(as_recorded(config, folder.root), folder.root)
        recorded = (folder.read_state().get("data") or {}).get("data.train")
        if recorded is not None and recorded != table.fingerprint:
            return None, "its data has changed since"
        return DataRows(table, order_of(config, table)), ""
    except (UserError, OperationError, OSError) as error:
        return None, f"its data cannot be read ({str(error).splitlines()[0]})"
