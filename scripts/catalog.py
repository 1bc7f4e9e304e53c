"""Write what `polyfed methods`, `models`, `datasets` and `recipe` list, and the pages that are made of it.

    python scripts/catalog.py

Writes src/polyfed/cli/catalog.json and docs/methods/README.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from polyfed.cli import catalog  # noqa: E402
from polyfed.experiments import method_table  # noqa: E402

if __name__ == "__main__":
    found = catalog.made()
    catalog.FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    pages = found["methods"].values()
    (ROOT / "docs" / "methods" / "README.md").write_text(method_table.to_markdown(pages), encoding="utf-8")
