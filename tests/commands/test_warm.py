# SPDX-License-Identifier: Apache-2.0
"""`kvcache warm`: prompts of a file, read once by vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache.commands.warm import PromptsError, read_prompts
from tests.commands.conftest import Run, Vllm

LINES = '{"prompt": "one two three"}\n\n"four five"\n[1, 2, 3, 4]\n{"prompt": [7], "id": "x"}\n'


def test_every_prompt_is_read_once(run: Run, vllm: Vllm, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(LINES)
    result = run("warm", "--prompts", file, "--vllm-url", vllm.url, "--salt", "s", "--at-a-time", 2)
    assert (result.exit_code, result.stdout) == (0, "4 prompts, 10 tokens\n")
    asked = sorted(str(body["prompt"]) for body in vllm.asked)
    assert asked == sorted(["one two three", "four five", "[1, 2, 3, 4]", "[7]"])
    assert all((b["max_tokens"], b["model"], b["cache_salt"]) == (1, "tiny", "s") for b in vllm.asked)


def test_as_json_and_with_a_model_s_name(run: Run, vllm: Vllm, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(LINES)
    result = run("warm", "--prompts", file, "--vllm-url", vllm.url, "--model", "m", "--json")
    assert json.loads(result.stdout) == {"prompts": 4, "prompt_tokens": 10}
    assert {body["model"] for body in vllm.asked} == {"m"}
    assert all("cache_salt" not in body for body in vllm.asked)


@pytest.mark.parametrize(
    "line",
    ["plain words", "{}", '{"prompt": ""}', "[]", '["a"]', "[1, -2]", "[true]", "7", '{"prompt": null}'],
)
def test_a_line_that_is_no_prompt_is_named(line: str) -> None:
    with pytest.raises(PromptsError, match="f, line 2: "):
        list(read_prompts(f'"good"\n{line}\n', "f"))


def test_what_cannot_be_used(run: Run, vllm: Vllm, tmp_path: Path) -> None:
    empty, binary, bad = tmp_path / "empty", tmp_path / "binary", tmp_path / "bad"
    empty.write_text("\n \n")
    binary.write_bytes(b"\xff\xfe")
    bad.write_text('"a bad prompt"\n' * 9)
    for file, said in (
        (tmp_path / "none", "No such file"),
        (empty, "no prompt"),
        (binary, "no UTF-8"),
        (bad, "vLLM answered 400"),
    ):
        result = run("warm", "--prompts", file, "--vllm-url", vllm.url)
        assert (result.exit_code, result.stdout) == (1, "")
        assert said in result.stderr
    assert "does not answer" in run("warm", "--prompts", bad, "--vllm-url", "http://127.0.0.1:9").stderr
