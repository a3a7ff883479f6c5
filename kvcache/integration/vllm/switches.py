# SPDX-License-Identifier: Apache-2.0
"""What a client may say of one request, in `kv_transfer_params` of vLLM's API. The names are LMCache's:

    {"kv_transfer_params": {"lmcache.skip_save": true, "lmcache.tag.project": "a"}}

Keys of other connectors, which do not start with `lmcache.`, are none of our business. One of ours that is
unknown, or has a value of the wrong kind, is left out and said so in the log, once: a request is not refused
for the cache's sake. One whose tags cannot be used is served without the cache, since it must not share.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm.kvcache")

PREFIX = "lmcache."
TAG = "lmcache.tag."
MAX_TAGS = 16
MAX_TAG_CHARS = 256


@dataclass(frozen=True)
class Switches:
    """Of one request."""

    skip_save: bool = False
    """Nothing of it is stored."""
    skip_load: bool = False
    """Nothing is looked up for it."""
    tags: tuple[tuple[str, str], ...] = ()
    """Names and values, sorted by name. KV is shared among requests with the same tags alone."""


NONE = Switches()


def read_switches(params: Mapping[str, Any] | None) -> Switches:
    """The switches in a request's `kv_transfer_params`. Raises nothing."""
    if not params:
        return NONE
    switches: dict[str, bool] = {}
    tags: dict[str, str] = {}
    for key, value in params.items():
        name = str(key)
        if name.startswith(TAG):
            if isinstance(value, str) and len(value) + len(name) <= MAX_TAG_CHARS and len(tags) < MAX_TAGS:
                tags[name.removeprefix(TAG)] = value
            else:
                switches = {"skip_save": True, "skip_load": True}
                _warn(
                    f"{name[:MAX_TAG_CHARS]} is one too many of {MAX_TAGS} tags, or no text of at most "
                    f"{MAX_TAG_CHARS} characters with its name: nothing is cached of the request"
                )
                break
        elif name in ("lmcache.skip_save", "lmcache.skip_load"):
            if isinstance(value, bool):
                switches[name.removeprefix(PREFIX)] = value
            else:
                _warn(f"{name} is a {type(value).__name__} and left out; write true or false")
        elif name.startswith(PREFIX):
            known = "skip_save, skip_load and tag.<name>"
            _warn(f"{name[:MAX_TAG_CHARS]} is unknown and left out; there are {known}")
    return Switches(**switches, tags=tuple(sorted(tags.items())))


def _warn(text: str) -> None:
    """Each text once, and not for ever: clients choose what stands in it."""
    if len(_warned) < _MOST_WARNINGS and text not in _warned:
        _warned.add(text)
        logger.warning("KV cache: kv_transfer_params: %s", text)


_MOST_WARNINGS = 64
_warned: set[str] = set()
