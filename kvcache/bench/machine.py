# SPDX-License-Identifier: Apache-2.0
"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from kvcache import _native


def machine() -> dict[str, Any]:
    """Processor, GPU, versions and how the native module was built."""
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "native": dict(_native.build_info()),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["multiprocessors"] = properties.multi_processor_count
    return found


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor())
