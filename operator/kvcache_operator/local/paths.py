# SPDX-License-Identifier: Apache-2.0
"""Rewrites the paths of a pod's mounts to the folders that stand for them.

There is no mount namespace, so what a container would find below `/run/kvcache` lies somewhere else, and
whatever names it (arguments, environment, mounted files) must say so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# A path starts where no path goes on: `/a/run/kvcache` does not name the mount `/run/kvcache`, but the path
# in `ipc:///run/kvcache` does. It ends at a slash or where a name cannot go on, so `/run/kvcache2` is another
# path.
_START = r"(?:(?<=://)|(?<![\w./~+%@-]))"
_END = r"(?=/|[^\w.~+%@-]|$)"


class PathRewriter:
    """Maps mount paths to folders in any text. Applying it twice is the same as applying it once."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        """`folders`: absolute mount path to absolute folder, both without a slash at the end."""
        # The folders map to themselves: one may lie below a mount path (a state folder in /tmp, say).
        self._targets = {folder: folder for folder in folders.values()} | dict(folders)
        longest_first = sorted(self._targets, key=len, reverse=True)
        alternatives = "|".join(re.escape(path) for path in longest_first)
        self._pattern = re.compile(f"{_START}(?:{alternatives}){_END}") if longest_first else None

    def __call__(self, text: str) -> str:
        """`text` with each mount path in it replaced, whole components only, the longest mount first."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._targets[match[0]], text)
