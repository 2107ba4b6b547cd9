"""Output of `areal-like validate` for a valid config: the resolved config, derived numbers, memory, hours, remarks.

The values are computed in derived.py, preflight.py and resources_page.py.
"""

from __future__ import annotations

from areal_like.config import dump_yaml
from controller.cli.resources_page import resource_lines
from controller.config.derived import advise, derive
from controller.config.loading import LoadedConfig
from controller.preflight.found import Preflight


def resolved_page(loaded: LoadedConfig, found: Preflight, *, price: float | None = None, lengths: str = "") -> str:
    """The whole page. Its first part, up to `# Derived`, is a valid config itself."""
    num_rows = len(found.train) if found.train is not None else None
    numbers = derive(loaded.config, num_rows=num_rows, model=found.model)
    names, values = max(len(d.name) for d in numbers), max(len(d.value) for d in numbers)
    lines = [f"# {loaded.source}, resolved", dump_yaml(loaded.config).rstrip(), "", "# Derived"]
    lines += [f"#   {d.name:<{names}}  {d.value:>{values}}  = {d.formula}" for d in numbers]
    if found.seats:
        title = "# Placement (Ray may choose other nodes with the same resources)"
        lines += ["", title, *(f"#   {line}" for line in found.seats)]
    remarks = [str(problem) for problem in found.absent] + found.notes + advise(loaded.config, num_rows)
    lines += ["", *resource_lines(loaded.config, found, price=price, lengths=lengths)]
    if remarks:
        lines += ["", "# Remarks", *(f"#   {remark}" for remark in remarks)]
    lines += ["", f"# {loaded.source} is valid"]
    return "\n".join(lines) + "\n"
