"""Build hook: notebooks become pages. `docs/notebooks/NAME.ipynb` is rendered, with its stored output, as
`notebooks/NAME/`; the notebook itself can be downloaded from the page. It is executed by tests/docs/test_notebooks.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

FOLDER = "notebooks"


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Add a page, and its pictures, for every notebook."""
    for path in sorted(Path(config.docs_dir, FOLDER).glob("*.ipynb")):
        text, pictures = rendered(path)
        files.append(File.generated(config, f"{FOLDER}/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"{FOLDER}/{name}", content=content))
    return files


def rendered(path: Path) -> tuple[str, dict[str, bytes]]:
    """Markdown of a notebook, and its pictures by file name."""
    text, resources = MarkdownExporter().from_notebook_node(nbformat.read(path, as_version=4))
    outputs = resources.get("outputs", {})
    for name in outputs:  # all notebooks name theirs alike
        text = text.replace(f"![png]({name})", f"![Figure]({path.stem}_{name})")
    title, _, rest = text.lstrip().partition("\n")
    pictures = {f"{path.stem}_{name}": content for name, content in outputs.items()}
    return f"{title}\n\n[Download this notebook]({path.name})\n{rest}", pictures
