# SPDX-License-Identifier: Apache-2.0
"""The releases of vLLM that the connector is tested with: others are refused unless the configuration says
`allow_untested_vllm`.

vLLM calls its connector interface experimental: pages change their layout and hooks their order between
releases, and a cache that guesses wrong garbles answers without a word.
"""

from __future__ import annotations

import re

from kvcache.integration.vllm.identity import UnsupportedError

FIRST, LAST = (0, 26), (0, 32)
"""Tested, both included, whatever the patch level: 0.26.0 on a GPU, 0.27.1 to 0.32.0 by `make test-vllm`."""

_NUMBERS = re.compile(r"(\d+)\.(\d+)(\.|\+|$)")


def is_tested(version: str) -> bool:
    """Whether a release, `0.32.0+cpu` say, is in the tested range. Previews and builds from sources are
    not: they may hold anything between two releases."""
    numbers = _NUMBERS.match(version)
    if numbers is None or re.search(r"rc|dev|alpha|beta", version):
        return False
    return FIRST <= (int(numbers[1]), int(numbers[2])) <= LAST


def check_version(version: str, *, allow_untested: bool) -> None:
    """Raises UnsupportedError for a version outside of the tested range, unless that is allowed."""
    if not allow_untested and not is_tested(version):
        first, last = (".".join(map(str, numbers)) for numbers in (FIRST, LAST))
        raise UnsupportedError(
            f"vLLM {version} was read, which this connector is not tested with: install vLLM {first} to "
            f"{last}, or set allow_untested_vllm to true"
        )
