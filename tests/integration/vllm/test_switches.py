# SPDX-License-Identifier: Apache-2.0
"""What a client says of one request in `kv_transfer_params`."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.integration.vllm import switches
from kvcache.integration.vllm.switches import Switches, read_switches
from kvcache.tokens.database import chain_root
from tests.integration.vllm.conftest import Log, MakePrompt, StartEngine
from tests.integration.vllm.engines import CHUNK, Reference


@pytest.fixture(autouse=True)
def _nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "_warned", set())


@pytest.mark.vllm
def test_on_a_real_vllm(start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt) -> None:
    engine = start_engine()
    prompt = make_prompt(3 * CHUNK + 20)

    def hit(prompt: list[int], **params: Any) -> int:
        said = {f"lmcache.{name.replace('__', '.')}": value for name, value in params.items()}
        answer = engine.answer(prompt, extra_args={"kv_transfer_params": said})
        assert answer.tokens == reference(prompt)
        engine.forget_gpu()
        return answer.cached_tokens

    assert [hit(prompt, skip_save=True), hit(prompt, skip_save=True)] == [0, 0]
    assert engine.stored() == []
    assert [hit(prompt, skip_load=True), hit(prompt, skip_load=True), hit(prompt)] == [0, 0, 3 * CHUNK]
    assert [hit(prompt, skip_save=True), hit(prompt, tag__project="a")] == [3 * CHUNK, 0]
    assert [hit(prompt, tag__project="b"), hit(prompt, tag__project="a"), hit(prompt)] == [
        0,
        3 * CHUNK,
        3 * CHUNK,
    ]
    assert hit(prompt, tag__project="a", tag__user="x") == 0
    assert [hit(prompt, tag__project=7), hit(prompt, unknown=1)] == [0, 3 * CHUNK]
    engine.check_clean()


@pytest.mark.parametrize(
    ("params", "expected", "said"),
    [
        (None, Switches(), ""),
        ({}, Switches(), ""),
        ({"do_remote_decode": True, "lmcacheish": 1}, Switches(), ""),
        ({"lmcache.skip_save": True}, Switches(skip_save=True), ""),
        ({"lmcache.skip_load": False, "lmcache.skip_save": True}, Switches(skip_save=True), ""),
        ({"lmcache.tag.b": "2", "lmcache.tag.a": "1"}, Switches(tags=(("a", "1"), ("b", "2"))), ""),
        ({"lmcache.skip_save": "yes"}, Switches(), "skip_save is a str"),
        ({"lmcache.skip_save": 1}, Switches(), "skip_save is a int"),
        ({"lmcache.priority": 3}, Switches(), "lmcache.priority is unknown"),
        ({"lmcache.tag.a": 1}, Switches(skip_save=True, skip_load=True), "nothing is cached"),
        ({"lmcache.tag.a": "x" * 300}, Switches(skip_save=True, skip_load=True), "nothing is cached"),
        (
            {f"lmcache.tag.{n}": "x" for n in range(17)},
            Switches(skip_save=True, skip_load=True, tags=tuple(sorted((str(n), "x") for n in range(16)))),
            "nothing is cached",
        ),
    ],
)
def test_reading(params: dict[str, Any] | None, expected: Switches, said: str, log: Log) -> None:
    assert read_switches(params) == read_switches(params) == expected
    assert said in log.text
    assert len(log.text.splitlines()) == bool(said)


def test_a_client_cannot_fill_the_log(log: Log) -> None:
    for number in range(1000):
        read_switches({f"lmcache.{number}": 1})
    assert len(log.text.splitlines()) == 64


def test_tags_are_told_apart_however_they_are_cut() -> None:
    roots = {
        chain_root(),
        chain_root(tags=[("a", "b")]),
        chain_root(tags=[("ab", "")]),
        chain_root(tags=[("", "ab")]),
        chain_root(tags=[("a", "b"), ("c", "d")]),
        chain_root(tags=[("a", "bc"), ("", "d")]),
        chain_root("a", "b"),
        chain_root("", "a", [("b", "")]),
    }
    assert len(roots) == 8
