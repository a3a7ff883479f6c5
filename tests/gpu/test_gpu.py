# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcache import _native
from tests.gpu.checks import CHECKS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not _native.cuda_available(), reason=f"needs a GPU: {_native.cuda_unavailable_reason()}"
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_the_gpu(check: Callable[[bool], None]) -> None:
    check(False)
