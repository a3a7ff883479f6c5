# SPDX-License-Identifier: Apache-2.0
"""The bench of the operator measures what it says, on a few resources."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import operator_load
from tests.cluster.api import Api


def test_a_small_load(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"APPLIES": 2, "BY_KUBECTL": 1, "MANY": 5, "RECONCILES": 3}.items():
        monkeypatch.setattr(operator_load, name, number)
    found = operator_load.measure(api, tmp_path)
    assert 0 < found.apply_median <= found.apply_most
    assert found.kubectl_itself_median > 0
    assert found.made_in > 0
    assert found.settled_in > 0
    assert (found.resources, found.writes) == (5, 0)
    assert found.reconciles >= 3
    assert f"{found.operator_mib} MiB" in operator_load.table(found)
