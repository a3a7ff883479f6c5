# SPDX-License-Identifier: Apache-2.0
"""Folders that are made once and seen only when they are whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

STAMP = "made-from.txt"


def made_once(target: Path, made_from: str, make: Callable[[Path], None]) -> bool:
    """Sees to it that `target` was made from what `made_from` says: if not, calls `make` with a fresh folder.

    The fresh folder lies beside `target` and takes its place by a rename once `make` has returned, so that
    nobody meets half of it; of two processes that make it at once, the later one's is thrown away.

    Args:
        made_from: Versions and digests of all inputs. Another text than the kept one makes it anew.

    Returns:
        Whether it was made now.
    """
    stamp = target / STAMP
    if _text(stamp) == made_from:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        make(fresh)
        (fresh / STAMP).write_text(made_from)
        fresh.chmod(0o755)
        if target.exists() and _text(stamp) != made_from:
            stale = Path(tempfile.mkdtemp(prefix=f".{target.name}.stale.", dir=target.parent))
            target.rename(stale / target.name)
            shutil.rmtree(stale)
        try:
            fresh.rename(target)
        except OSError:
            if _text(stamp) != made_from:
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True


def _text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None
