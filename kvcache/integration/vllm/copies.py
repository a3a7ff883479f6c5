# SPDX-License-Identifier: Apache-2.0
"""How the workers' copies run, and when a request had better wait for its load outside of the batch."""

from __future__ import annotations

from dataclasses import dataclass

ASSUMED_RATE = 40e9
"""Bytes a second of a rank's loads before any was measured: a PCIe 5 x16 link with room to spare."""
BLOCKING_SECONDS = 3e-3
"""A load that takes less than this is not worth another step of the scheduler: about half a decoding step."""
_SMOOTHING = 0.3


@dataclass
class Copies:
    """What the scheduler knows of the ranks' copies.

    Args:
        run_behind: they run beside the model (on a GPU) and end after the call that starts them.
        token_bytes: bytes of one token's KV on one rank.
        rate: measured, bytes a second of one rank.
    """

    run_behind: bool
    token_bytes: int
    rate: float = ASSUMED_RATE

    def observe(self, load_bytes: int, seconds: float) -> None:
        """Takes in what finished loads moved and how long they took, over all ranks that report."""
        if load_bytes and seconds > 0:
            self.rate += _SMOOTHING * (load_bytes / seconds - self.rate)

    def worth_waiting_outside(self, mode: str, tokens: int, others: int) -> bool:
        """Whether a load of `tokens` tokens should not hold up the batch.

        Args:
            mode: `Auto`, `Always` or `Never`.
            tokens: to load.
            others: other requests of the step before that go on. Alone, a request has its first token sooner
                by going into the batch at once: the host launches the model's kernels while the copy runs.
                Waiting outside of the batch takes a step more, and up to another until its end is seen.
        """
        if mode != "Auto":
            return mode == "Always"
        return self.run_behind and others > 0 and tokens * self.token_bytes / self.rate > BLOCKING_SECONDS
