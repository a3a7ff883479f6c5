# SPDX-License-Identifier: Apache-2.0
"""`kvcache lookup`: which part of a prompt is cached, and in which tier."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.commands.client import DEFAULT_URL, AdminClient, TokenPath, Url
from kvcache.commands.output import AsJson, console, count, fail, print_json, share, table


def lookup(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; vLLM cuts it into tokens.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with the prompt; - is stdin.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Token ids instead of a text: 1,2,3.")] = None,
    salt: Annotated[str, typer.Option(help="cache_salt of the requests.")] = "",
    url: Url = DEFAULT_URL,
    token_file: TokenPath = None,
    as_json: AsJson = False,
) -> None:
    """Say which part of a prompt is cached, and in which tier."""
    if sum(given is not None for given in (prompt, file, tokens)) != 1:
        fail("the prompt is needed once: as a text, by --file, or by --tokens", 2)
    body: dict[str, Any] = {"salt": salt} if salt else {}
    if tokens is not None:
        body["tokens"] = _ids(tokens)
    else:
        body["prompt"] = _read(file) if prompt is None else prompt
    report = AdminClient(url, token_file).post("/v1/lookup", body)
    if as_json:
        print_json(report)
        return
    total = report["tokens"]
    columns = ["tier", "from token", "tokens", "share"]
    rows = [
        (
            part["tier"],
            count(part["first_token"]),
            count(part["tokens"]),
            share(part["tokens"] / total),
        )
        for part in report["parts"]
    ]
    cached = f"{report['cached_tokens']:,} of {total:,} tokens are cached"
    console().print(table(cached, columns, rows) if rows else cached)
    for name, reason in report["missing"].items():
        typer.echo(f"{name} is missing: {reason}", err=True)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        fail(f"--tokens: {str(error).rpartition(': ')[2]} is no token id; write numbers as in 1,2,3", 2)


def _read(file: Path | None) -> str:
    try:
        return sys.stdin.read() if file is None or str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file} cannot be read ({getattr(error, 'strerror', None) or 'no UTF-8'}); name a text file")
