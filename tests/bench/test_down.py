# SPDX-License-Identifier: Apache-2.0
"""The arithmetic and the proofs of the bench of a remote that is down; its engines are doubles here."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvcache.bench import __main__ as command_line
from kvcache.bench import down


@dataclass
class Child:
    seconds: Iterator[float]
    state: str = ""
    asked: list[Sequence[int]] = field(default_factory=list)
    lies: bool = False

    def answer(self, prompt: Sequence[int]) -> tuple[float, str, list[int]]:
        self.asked.append(prompt)
        return next(self.seconds), self.state, [sum(prompt) + self.lies]


def measure(fault: str, ours: Child, without: Child, rounds: int) -> down.DownResult:
    dice = random.Random(5)
    prompt = lambda: [dice.randrange(1000) for _ in range(7)]  # noqa: E731
    return down._measure(fault, cast(Any, ours), cast(Any, without), prompt, rounds)


def always(*seconds: float) -> Iterator[float]:
    return iter(seconds)


def test_pairs_of_the_same_prompts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(down, "_STEADY_S", 0.0)
    ours = Child(always(1.5, 1.1, 2.0, 0.9, 3.3), "RemoteSlow")
    without = Child(always(1.0, 1.0, 1.0, 3.0))
    result = measure("hangs", ours, without, 4)
    assert ours.asked[1:] == without.asked
    assert (result.fault, result.state, result.requests) == ("hangs", "RemoteSlow", 4)
    assert (result.with_s, result.without_s) == (1.55, 1.0)
    assert result.first_extra_s == 0.5
    # Pairs that begin with the one: 1.1 and 0.9; with the other: 2.0 and 1.1.
    assert result.ratio == pytest.approx((1.0 * 1.55) ** 0.5)
    assert result.low < result.ratio < result.high


@pytest.mark.parametrize(
    ("fault", "state"), [("hangs", "Ready"), ("refuses", "Ready"), ("none", "RemoteSlow")]
)
def test_a_fault_that_was_not_met_has_no_figures(
    monkeypatch: pytest.MonkeyPatch, fault: str, state: str
) -> None:
    monkeypatch.setattr(down, "_STEADY_S", 0.0)
    with pytest.raises(RuntimeError, match=f"{fault}: the tier's state is {state}"):
        measure(fault, Child(always(*[1.0] * 9), state), Child(always(*[1.0] * 9)), 4)


def test_other_answers_have_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(down, "_STEADY_S", 0.0)
    with pytest.raises(RuntimeError, match="the answer is another"):
        measure("none", Child(always(*[1.0] * 9), "Ready", lies=True), Child(always(*[1.0] * 9)), 4)


def test_too_few_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["down", "--model", "nowhere", "--rounds", "1"]) == 1
    assert "--rounds above 1" in capsys.readouterr().err
