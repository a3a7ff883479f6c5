# SPDX-License-Identifier: Apache-2.0
"""What tests of several parts share: models, and short folders for sockets."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

from image.models.folder import made_once

BUILD = Path(__file__).resolve().parents[1] / "build"
MODELS = BUILD / "models"

set_hypothesis_home_dir(BUILD / "hypothesis")
# A busy machine is no failure: nothing here is judged by the clock.
hypothesis.settings.register_profile(
    "kvcache", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kvcache")

SOCKETS = tempfile.mkdtemp(prefix="kvc-", dir="/tmp")
"""Of vLLM, which leaves them behind; a short path, as in `socket_dir`."""
atexit.register(shutil.rmtree, SOCKETS, ignore_errors=True)

# Read by vLLM when it is imported, here and in the processes that tests start: no hub, no usage report, the
# smallest KV space (GiB) on the CPU.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_RPC_BASE_PATH=SOCKETS,
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Lets one process start an engine after numba was loaded.

    When it starts, vLLM 0.32 looks through `vars()` of all objects of all loaded modules. llvmlite's library
    object makes up any attribute that it is asked for, a `__dict__` too, which is then no dictionary.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None:
        ffi.lib._fntab.setdefault("__dict__", {})


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of a random Llama (2 layers, 2 KV heads of 64, vocabulary 512); see tests/models/tiny_llama."""
    from tests.models import tiny_llama

    target = MODELS / "tiny-llama"
    made_once(target, tiny_llama.made_from(), tiny_llama.make)
    return target


@pytest.fixture(scope="session")
def tiny_mla_model() -> Path:
    """Folder of a random model with MLA (2 layers, a latent of 576); see tests/models/tiny_mla."""
    from tests.models import tiny_mla

    target = MODELS / "tiny-mla"
    made_once(target, tiny_mla.made_from(), tiny_mla.make)
    return target


@pytest.fixture(scope="session")
def smollm2_model() -> Path:
    """Folder of SmolLM2-135M-Instruct; downloads 93 MB the first time, as `make model` does."""
    from image.models import smollm2

    made_once(smollm2.TARGET, smollm2.made_from(), smollm2.make)
    return smollm2.TARGET


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """An empty folder with a path short enough for unix sockets, whose whole path may have 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
