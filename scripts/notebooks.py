"""Run the notebooks of ``examples`` and keep in them what they print and show.

python scripts/notebooks.py [NAME ...]        # examples/NAME.ipynb; all, where none is named

Cells tagged "skip-execution" (the installation) are left out.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def executed(file: Path, folder: Path) -> Any:
    """The notebook as it is after all of its cells have run in this folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(file, as_version=4)
    options = {"startup_timeout": 600, "timeout": None, "record_timing": False, "coalesce_streams": True}
    NotebookClient(book, resources={"metadata": {"path": str(folder)}}, **options).execute()
    return book


def main(names: list[str]) -> None:
    """Each notebook in a folder of its own."""
    import nbformat

    for file in [EXAMPLES / f"{name}.ipynb" for name in names] or sorted(EXAMPLES.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            book = executed(file, Path(folder))
        book.metadata["language_info"] = {"name": "python"}
        nbformat.write(book, file)
        print(file)


if __name__ == "__main__":
    main(sys.argv[1:])
