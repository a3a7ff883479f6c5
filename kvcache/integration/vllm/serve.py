# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM's API server with the cache, or without it where it cannot work: the images' entry point.

    python -m kvcache.integration.vllm.serve [FLAG OF VLLM]...

Checks what vLLM could not survive, before vLLM is there: the connector is imported by vLLM's own processes,
and an import that fails ends them. If the native module does not load, or vLLM's connector interface is
another one, the flag with the connector is taken away, one sentence says why, and vLLM serves without a
cache: slower, and as right as before. A vLLM outside of the tested releases is named too; the connector
decides about it by its configuration."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from kvcache.config import ConfigError

SERVER = "vllm.entrypoints.openai.api_server"
CONNECTOR = "kvcache.integration.vllm.connector"
_FLAG = "--kv-transfer-config"


def names_our_connector(value: str) -> bool:
    """Whether a value of vLLM's flag is about this connector, and not about another one."""
    return CONNECTOR in value


def without_cache(arguments: Sequence[str]) -> list[str]:
    """vLLM's arguments without the flag that names our connector, in both of its forms."""
    kept: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == _FLAG:
            if not equals:
                value = waiting[0] if waiting else ""
            if names_our_connector(value):
                waiting = waiting if equals else waiting[1:]
                continue
        kept.append(argument)
    return kept


def why_not() -> str:
    """Why the cache cannot work in this environment, in a sentence; empty if it can."""
    try:
        from kvcache import _native

        native = _native.build_info()
    except Exception as error:
        return f"its native module does not load ({_text(error)}); build it for this Python: make build"
    try:
        import vllm

        import kvcache.integration.vllm.connector  # noqa: F401
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return (
            f"its connector does not fit this vLLM ({_text(error)}); install a release that it is tested with"
        )
    from kvcache.integration.vllm.versions import is_tested

    tested = "tested" if is_tested(vllm.__version__) else "not among the tested releases"
    kernels = "CUDA kernels" if native["cuda"] else "host code alone"
    _say(f"vLLM {vllm.__version__} ({tested}), native module with {kernels}")
    return ""


def _say(text: str) -> None:
    """To stderr, as vLLM's log goes; vLLM's logging is not set up yet."""
    sys.stderr.write(f"kvcache: {text}\n")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def main(arguments: Sequence[str]) -> None:
    """Checks, then becomes vLLM."""
    reason = why_not()
    if reason:
        _say(f"off, since {reason}. vLLM serves on without it.")
        # A fresh process: half of the imports may have failed in this one.
        os.execv(sys.executable, [sys.executable, "-m", SERVER, *without_cache(arguments)])  # noqa: S606
    # The same process: importing vLLM and torch a second time would cost ten seconds of each start.
    sys.argv[1:] = arguments
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
