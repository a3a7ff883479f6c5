# SPDX-License-Identifier: Apache-2.0
"""What the demo saw, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

LEAST_SHARE = 0.9


@dataclass(frozen=True)
class Result:
    """The same prompt three times: computed, given back by the cache, and given back after a restart."""

    prompt_tokens: int
    hit_tokens: int
    """Tokens of the second prompt whose KV came from the cache."""
    cold_ttft_s: float
    """Seconds to the first token of the first answer."""
    hit_ttft_s: float
    """Seconds to the first token of the second answer."""
    identical_output: bool
    """Of all three answers."""
    restart_hit_tokens: int
    """Tokens of the third prompt whose KV a new vLLM process got from the disk of the one before."""
    restart_ttft_s: float


def write(result: Result, path: Path) -> None:
    path.write_text(json.dumps(asdict(result), indent=2) + "\n")


def table(result: Result) -> str:
    """The result as aligned lines."""
    share = result.hit_tokens / result.prompt_tokens
    rows = [
        ("prompt", f"{result.prompt_tokens:,} tokens"),
        ("given back by the cache", f"{result.hit_tokens:,} tokens ({share:.0%})"),
        ("time to first token, computed", f"{result.cold_ttft_s:.2f} s"),
        ("time to first token, from the cache", f"{result.hit_ttft_s:.2f} s"),
        ("speed-up", f"{result.cold_ttft_s / result.hit_ttft_s:.1f} x"),
        ("given back after a restart", f"{result.restart_hit_tokens:,} tokens, from disk"),
        ("time to first token, from disk", f"{result.restart_ttft_s:.2f} s"),
        ("all answers are equal", "yes" if result.identical_output else "NO"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def shortfall(result: Result) -> str | None:
    """What the cache owes, if anything: equal answers, and nine tenths of the prompt each time."""
    if not result.identical_output:
        return "the answers differ; the cache gave back something other than what was computed"
    for given, when in ((result.hit_tokens, ""), (result.restart_hit_tokens, " after a restart")):
        if given < LEAST_SHARE * result.prompt_tokens:
            share = f"{given} of {result.prompt_tokens} tokens"
            return f"the cache gave back {share}{when}, and at least {LEAST_SHARE:.0%} are due"
    return None
