# SPDX-License-Identifier: Apache-2.0
"""A real vLLM over each kind of tier while that is slow, silent, damaged, full or gone: its answers are those
of a vLLM without a cache, and when the place works again so do the hits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcache.storage import lane
from kvcache.storage.tier import ClearScope
from kvcache.storage.tiers import remote
from tests.integration.vllm.conftest import MakePrompt
from tests.integration.vllm.engines import CHUNK, Engine, Reference, Tokens
from tests.integration.vllm.failing import DiskPlace, MooncakePlace, Place, S3Place, Seen, ValkeyPlace
from tests.storage.remote.rigs import QUICK, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CPU = {"capacity": "64Mi", "eviction": "LRU", "admission": "Always"}
TOKENS = 4
"""Of an answer."""


@pytest.fixture(scope="module")
def known(make_prompt: MakePrompt) -> list[Tokens]:
    """Prompts that lie in the tier when a fault begins."""
    return [make_prompt(2 * CHUNK + 9) for _ in range(3)]


def only_below(engine: Engine) -> None:
    """All that was written is in the tier below alone."""
    side = engine.worker._worker
    assert side is not None
    storage = side.engine.storage
    eventually(lambda: not any(writer.pending_bytes for writer in storage._writers))
    engine.forget_gpu()
    storage.clear(ClearScope(), ["cpu"])


def until_all_is_given(engine: Engine, prompts: list[Tokens], expected: list[Tokens]) -> None:
    """Asks for the prompts until the tier gives all of them back."""

    def given() -> bool:
        only_below(engine)
        answers = [engine.answer(prompt, TOKENS) for prompt in prompts]
        assert [answer.tokens for answer in answers] == expected
        return all(answer.cached_tokens == 2 * CHUNK for answer in answers)

    eventually(given)


@pytest.fixture(scope="class")
def place(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """The class's place with an engine on it, the same one for all its troubles."""
    with ExitStack() as stack:
        patches = stack.enter_context(pytest.MonkeyPatch.context())
        # Probes come soon, and what a fault measured does not keep anybody from fetching after it.
        patches.setattr(remote, "BreakerPolicy", lambda: QUICK)
        patches.setattr(lane, "MEASURED_FOR_S", -1.0)
        place: Place = request.cls.kind(tmp_path_factory.mktemp("place"))
        stack.callback(place.close)
        place.engine = Engine(tiny_model, {"tiers": {"cpu": CPU, **place.tier}})
        stack.callback(place.engine.close)
        yield place


class OnPlace:
    kind: type[Place]

    def test_answers_are_right_whatever_the_tier_does(
        self, place: Place, trouble: str, known: list[Tokens], reference: Reference, make_prompt: MakePrompt
    ) -> None:
        engine, new = place.engine, make_prompt(2 * CHUNK + 5)
        expected = reference.all(known, TOKENS)
        until_all_is_given(engine, known, expected)
        only_below(engine)
        before = Seen.of(engine)
        fault = place.trouble(trouble)
        fault.begin()
        try:
            answers = [engine.answer(prompt, TOKENS) for prompt in [*known, new]]
            assert [answer.tokens for answer in answers] == [*expected, reference(new, TOKENS)]
            eventually(lambda: fault.shows(before, Seen.of(engine)))
            assert fault.met is None or fault.met() > 0
            given = Seen.of(engine).hit_tokens - before.hit_tokens
            assert fault.gives in (None, given == len(known) * 2 * CHUNK)
            if Seen.of(engine).state != "Ready" and not fault.gives:
                waits = engine.scheduler_stats.lookup_waits
                engine.forget_gpu()
                assert engine.answer(known[0], TOKENS).tokens == expected[0]
                assert engine.scheduler_stats.lookup_waits == waits, "nobody waits for it any more"
        finally:
            fault.end()
        until_all_is_given(engine, known, expected)
        assert engine.rank_stats.tiers[1].state == "Ready"
        engine.check_clean()


@pytest.mark.parametrize("trouble", DiskPlace.TROUBLES)
class TestDisk(OnPlace):
    kind = DiskPlace


@pytest.mark.parametrize("trouble", ValkeyPlace.TROUBLES)
class TestValkey(OnPlace):
    kind = ValkeyPlace


@pytest.mark.parametrize("trouble", S3Place.TROUBLES)
class TestS3(OnPlace):
    kind = S3Place


@pytest.mark.parametrize("trouble", MooncakePlace.TROUBLES)
class TestMooncake(OnPlace):
    kind = MooncakePlace
