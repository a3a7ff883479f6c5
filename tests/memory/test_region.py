# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from kvcache import _native
from kvcache.memory.region import HostRegion

NO_GPU = pytest.mark.skipif(_native.cuda_available(), reason="there is a GPU here")


def wait_until_populated(region: HostRegion) -> None:
    deadline = time.monotonic() + 60
    while region.native.populated_bytes < region.capacity_bytes:
        assert time.monotonic() < deadline, "the background work did not end"
        time.sleep(0.01)


def smaps(region: HostRegion) -> str:
    """What the kernel says of the region's mapping."""
    text = Path("/proc/self/smaps").read_text(encoding="ascii")
    found = re.search(rf"^{region.address:x}-.*?(?=^[0-9a-f]+-|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group()


def setting(path: str) -> str:
    file = Path(path)
    return file.read_text(encoding="ascii") if file.is_file() else ""


@pytest.mark.skipif(
    "[never]" in setting("/sys/kernel/mm/transparent_hugepage/enabled")
    or not setting("/sys/kernel/mm/transparent_hugepage/enabled"),
    reason="this kernel gives no huge pages",
)
def test_the_pages_are_huge_ones() -> None:
    region = HostRegion(32 << 20, pin="Disabled")
    region.prepare(4096)
    wait_until_populated(region)
    huge = re.search(r"^AnonHugePages: +(\d+) kB", smaps(region), re.MULTILINE)
    # The kernel may find no room for one or another.
    assert huge is not None
    assert int(huge.group(1)) >= 16 << 10
    assert region.address % (2 << 20) == 0
    region.close()


@pytest.mark.skipif(not setting("/proc/self/numa_maps"), reason="this kernel tells no NUMA policies")
def test_the_pages_are_wanted_on_the_node() -> None:
    regions = [HostRegion(4 << 20, pin="Disabled", numa_node=node) for node in (0, -1)]
    policies = []
    for region in regions:
        region.prepare(4096)
        wait_until_populated(region)
        (line,) = (
            line
            for line in setting("/proc/self/numa_maps").splitlines()
            if line.startswith(f"{region.address:08x} ")
        )
        policies.append(line.split()[1])
        region.close()
    # Without a node the process's own policy stays, which is not `default` where a vLLM has bound its memory.
    assert policies[0] == "prefer:0"
    assert not policies[1].startswith("prefer")


def test_pages_are_populated_in_the_background_and_keep_their_content() -> None:
    region = HostRegion(32 << 20, pin="Disabled")
    tensor = region.as_tensor()
    tensor[:: 1 << 20] = 7
    region.prepare(1 << 20)
    tensor[1 :: 1 << 20] = 9
    wait_until_populated(region)
    assert tensor[:: 1 << 20].tolist() == [7] * 32
    assert tensor[1 :: 1 << 20].tolist() == [9] * 32
    assert (region.state, region.reason, region.ready_bytes) == ("Pageable", "", 32 << 20)
    del tensor
    region.close()
    region.close()
    assert region.address == 0


@NO_GPU
@pytest.mark.parametrize("pin", ["Preferred", "Required"])
def test_without_a_gpu_nothing_is_locked_and_the_reason_is_said(pin: str) -> None:
    region = HostRegion(1 << 20, pin=pin)  # type: ignore[arg-type]
    region.prepare(4096)
    assert region.state == "Pageable"
    assert region.reason
    assert not _native.is_pinned(region.address, 1)
    region.close()


def test_a_region_that_cannot_be_mapped() -> None:
    with pytest.raises(
        RuntimeError, match="bytes could not be mapped: Cannot allocate memory; lower the capacity"
    ):
        HostRegion(1 << 50)
    for capacity in (0, 1 << 63, (1 << 64) - 4096):
        with pytest.raises(ValueError, match=f"the capacity is {capacity} bytes; give at least one chunk"):
            HostRegion(capacity)


def test_prepare_is_called_once() -> None:
    region = HostRegion(1 << 20, pin="Disabled")
    with pytest.raises(ValueError, match="the granule is 0 bytes"):
        region.prepare(0)
    region.prepare(4096)
    with pytest.raises(ValueError, match="called once"):
        region.prepare(4096)
    region.close()
    with pytest.raises(BufferError):
        memoryview(region.native)


def test_a_held_region_is_populated_and_closes_while_it_waits() -> None:
    region = HostRegion(4 << 20, hold=True)
    region.prepare(4096)
    wait_until_populated(region)
    assert not _native.is_pinned(region.address, 1)
    region.start_pinning()
    region.start_pinning()
    region.close()
