# SPDX-License-Identifier: Apache-2.0
"""Writes the dashboards' JSON: `python dashboards/generate.py`; `--check` only says what is out of date."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
if __name__ == "__main__":
    # As a script its own folder is on the path, and not the one that the package lies in.
    sys.path.insert(0, str(FOLDER.parent))

from dashboards.grafana import Page
from dashboards.operator_page import OPERATOR
from dashboards.overview import OVERVIEW
from dashboards.tiers import TIERS

PAGES: dict[str, Page] = {"overview": OVERVIEW, "tiers": TIERS, "operator": OPERATOR}
"""By the name of the file."""


def rendered(page: Page) -> str:
    """The text of the page's file, the same in every run."""
    return json.dumps(page.to_json(), indent=2, ensure_ascii=False) + "\n"


def outdated(folder: Path = FOLDER) -> list[str]:
    """Names of files that are missing, differ from what would be written, or belong to no page."""
    wanted = {f"{name}.json": rendered(page) for name, page in PAGES.items()}
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def main() -> int:
    """Returns 1 if `--check` finds a file that is out of date."""
    parser = argparse.ArgumentParser(prog="dashboards/generate.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    if parser.parse_args().check:
        names = outdated()
        if names:
            found = f"error: {', '.join(names)} in {FOLDER.name}/ is out of date"
            print(f"{found}; run python dashboards/generate.py", file=sys.stderr)
        return 1 if names else 0
    for name, page in PAGES.items():
        (FOLDER / f"{name}.json").write_text(rendered(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
