# SPDX-License-Identifier: Apache-2.0
"""The documents of this project, and what stands in them: links, headings, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^|\n\n)((?:    .+\n)+)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A piece of code in a page. `language` is empty for an indented one, which is a command here."""

    page: Path
    language: str
    text: str


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def links(page: Path) -> Iterator[str]:
    """Targets as they are written."""
    yield from _LINK.findall(without_code(page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Of the page's headings, as a host of Git repositories makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for language, code in _FENCE.findall(text):
        yield Block(page, language or "text", code)
    for code in _INDENTED.findall(_FENCE.sub("", text)):
        yield Block(page, "", re.sub(r"^    ", "", code, flags=re.MULTILINE))


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in blocks of shell, and in indented ones; parts of a pipe by themselves."""
    for block in blocks(page):
        if block.language not in ("", "sh"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            part: list[str] = []
            for word in [*words, "|"]:
                if word in ("|", "&", "&&", ";"):
                    if part:
                        yield part
                    part = []
                else:
                    part.append(word)
