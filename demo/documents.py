# SPDX-License-Identifier: Apache-2.0
"""The text that the demo asks about: what this repository says about itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

DOCUMENTS = ("README.md", "CONTRIBUTING.md")
PACKAGES = ("kvcache", "operator/kvcache_operator")


def own_documents(root: Path) -> str:
    """README, CONTRIBUTING and the module docstrings of both packages, in this order."""
    documents = [(root / name).read_text() for name in DOCUMENTS]
    return "\n\n".join([*documents, *_docstrings(root)])


def _docstrings(root: Path) -> Iterator[str]:
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text()))
            if text:
                yield f"{path.relative_to(root)}\n{text}"
