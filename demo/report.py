# SPDX-License-Identifier: Apache-2.0
"""What the demo saw, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

LEAST_SHARE = 0.9


@dataclass(frozen=True)
class Result:
    """The same prompt twice: computed, and given back by the cache."""

    prompt_tokens: int
    hit_tokens: int
    """Tokens of the second prompt whose KV came from the cache."""
    cold_ttft_s: float
    """Seconds to the first token of the first answer."""
    hit_ttft_s: float
    """Seconds to the first token of the second answer."""
    identical_output: bool


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
        ("both answers are equal", "yes" if result.identical_output else "NO"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def shortfall(result: Result) -> str | None:
    """What the cache owes, if anything: equal answers, and nine tenths of the prompt."""
    if not result.identical_output:
        return "the two answers differ; the cache gave back something other than what was computed"
    if result.hit_tokens < LEAST_SHARE * result.prompt_tokens:
        share = f"{result.hit_tokens} of {result.prompt_tokens} tokens"
        return f"the cache gave back {share}, and at least {LEAST_SHARE:.0%} are due"
    return None
