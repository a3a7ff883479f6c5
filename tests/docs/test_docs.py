# SPDX-License-Identifier: Apache-2.0
"""The documents are true where that can be told: links lead somewhere, commands are there, figures add up."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import typer.main
import yaml

from kvcache.admin.models import FlushRequest
from kvcache.cli import app
from kvcache.config import LMCacheEngineConfig
from kvcache_operator.parse import parse_resource
from tests.docs.pages import PAGES, ROOT, anchors, blocks, commands, links

COMMANDS = [(page, command) for page in PAGES for command in commands(page)]
PROGRAM = typer.main.get_command(app)


def named(value: object) -> str:
    if isinstance(value, Path):
        return value.name
    return " ".join(value)[:60] if isinstance(value, list) else str(value)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    new = {ROOT / "README.md"}
    while new:
        page = new.pop()
        seen.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        new |= {target for target in targets if target.suffix == ".md" and target.exists()} - seen
    assert set(PAGES) <= seen


def test_pages_that_follow_from_the_code_are_up_to_date() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_every_field_and_metric_is_explained() -> None:
    for name in ("configuration.md", "metrics.md"):
        for row in re.findall(r"^\| `.+\|$", (ROOT / "docs" / name).read_text(), re.MULTILINE):
            assert len(row.replace(r"\|", "").split("|")[-2].strip()) > 3, row


def _is_there(words: list[str]) -> bool:
    """Whether what a command names is part of this project, or a program that documents may presuppose."""
    name = words[0].removeprefix(".venv/bin/")
    if name == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return all(word in targets or "=" in word for word in words[1:])
    if name == "kvcache":
        return words[1] in PROGRAM.commands  # type: ignore[attr-defined]
    if name in ("python", "python3") and words[1] == "-m":
        return importlib.util.find_spec(words[2]) is not None
    if name in ("python", "python3"):
        return words[1] == "-c" or (ROOT / words[1]).is_file()
    if "/" in name:
        return (ROOT / name).is_file()
    return name in {"base64", "cp", "curl", "kind", "kubectl", "k3d", "git", "sed"}


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=named)
def test_commands_are_there(page: Path, words: list[str]) -> None:
    assert _is_there(words), f"{page.name}: {' '.join(words)}"


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=named)
def test_files_of_commands_are_there(page: Path, words: list[str]) -> None:
    # What a command makes, or what the reader has.
    made = {"build/models", "token"}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("-f", "-k") and following not in ("-", "RESOURCE.yaml"):
            assert (ROOT / following).exists(), following
        match = re.fullmatch(r"(?:--from-file|--claim)=?(?:\w+=)?(.+)", word)
        if match:
            assert match[1] in made or (ROOT / match[1]).exists(), word


def made_by_programs() -> dict[str, object]:
    """JSON files that documents make by a line of Python, and what is in them."""
    made: dict[str, object] = {}
    for page, words in COMMANDS:
        if words[:2] == ["python3", "-c"]:
            assert words[3] == ">", f"{page.name}: {' '.join(words)}"
            ran = subprocess.run([sys.executable, *words[1:3]], cwd=ROOT, capture_output=True, check=True)
            made[words[4]] = json.loads(ran.stdout)
    return made


def test_the_long_question_is_long_enough_to_be_given_back() -> None:
    question = made_by_programs()["question.json"]
    assert isinstance(question, dict)
    assert question.keys() == {"model", "prompt", "max_tokens", "temperature"}
    assert len(question["prompt"]) > 3 * 256  # a token has some four characters, and a chunk 256 tokens


def test_the_volume_of_the_quick_start_is_valid_kubernetes() -> None:
    for document in yaml.safe_load_all((ROOT / "docs" / "examples" / "models-volume.yaml").read_text()):
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_the_claim_of_the_quick_start_is_the_one_that_samples_name() -> None:
    volume, claim = yaml.safe_load_all((ROOT / "docs" / "examples" / "models-volume.yaml").read_text())
    (node,) = yaml.safe_load((ROOT / "docs" / "examples" / "kind.yaml").read_text())["nodes"]
    (mount,) = node["extraMounts"]
    assert volume["spec"]["hostPath"]["path"] == mount["containerPath"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    sample = yaml.safe_load((ROOT / "manifests" / "samples" / "smollm2.yaml").read_text())
    assert claim["metadata"]["name"] == sample["spec"]["model"]["volume"]["claimName"]


def test_bodies_of_requests_are_what_the_routes_read() -> None:
    flushes = 0
    for _, words in COMMANDS:
        if words[0] != "curl" or "-d" not in words:
            continue
        text = words[words.index("-d") + 1]
        if text.startswith("@"):
            assert text.removeprefix("@") in made_by_programs(), text
            continue
        body = json.loads(text)
        if any(word.endswith("/v1/flush") for word in words):
            FlushRequest.model_validate(body)
            flushes += 1
    assert flushes


def test_resources_in_documents_can_be_used() -> None:
    found = 0
    for page in PAGES:
        for block in blocks(page):
            if block.language != "yaml":
                continue
            document = yaml.safe_load(block.text)
            if isinstance(document, dict) and document.get("kind") == "KVCache":
                parse_resource(document)
                found += 1
    assert found


def test_sizes_add_up() -> None:
    text = (ROOT / "docs" / "sizing.md").read_text()
    rows = re.findall(r"^\| (?!model|---)(.+?) \| (.+?) \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for _, shape, token_bytes, tokens in rows:
        numbers = [int(number) for number in re.findall(r"\d+", shape)]
        factors: list[int] = [2, *numbers] if "latent" in shape else [2, 2, *numbers]
        product = 1
        for factor in factors:
            product *= factor
        said, in_32_gib = int(token_bytes.replace(",", "")), int(tokens.replace(",", ""))
        assert product == said
        assert in_32_gib == pytest.approx((32 << 30) / product, rel=1e-3)


def test_the_configuration_s_page_names_every_field() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()

    def check(model: Any, prefix: str) -> None:
        for name, value in model.model_dump().items():
            assert f"| `{prefix}{name}" in text
            if isinstance(value, dict) and value:
                check(getattr(model, name), f"{prefix}{name}.")

    check(LMCacheEngineConfig(), "")
