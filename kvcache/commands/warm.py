# SPDX-License-Identifier: Apache-2.0
"""`kvcache warm`: has vLLM read prompts once, so that the next who asks about them hits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvcache.commands.client import DEFAULT_VLLM_URL, VllmUrl
from kvcache.commands.output import AsJson, fail, print_json, progress_console
from kvcache.commands.vllm import VllmClient

Prompt = str | list[int]


class PromptsError(ValueError):
    """A file of prompts cannot be used. The text names the line."""


def warm(
    prompts: Annotated[
        Path,
        typer.Option(
            help='Prompts, one a line: JSON ({"prompt": "..."}, a text or a list of token ids); - is stdin.'
        ),
    ],
    vllm_url: VllmUrl = DEFAULT_VLLM_URL,
    model: Annotated[str | None, typer.Option(help="Name under which the model is served.")] = None,
    salt: Annotated[str | None, typer.Option(help="cache_salt of the requests that are to hit.")] = None,
    at_a_time: Annotated[int, typer.Option(min=1, max=256, help="Requests at a time.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Have vLLM read prompts, so that they are in the cache when they are asked about."""
    try:
        text = sys.stdin.read() if str(prompts) == "-" else prompts.read_text(encoding="utf-8")
        found = list(read_prompts(text, str(prompts)))
    except PromptsError as error:
        fail(str(error))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no UTF-8"
        fail(f"{prompts} cannot be read ({why}); name a file of prompts")
    if not found:
        fail(f"{prompts} holds no prompt; write one a line")
    tokens = _warm(VllmClient(vllm_url, model), found, salt, at_a_time)
    if as_json:
        print_json({"prompts": len(found), "prompt_tokens": tokens})
    else:
        typer.echo(f"{len(found):,} prompts, {tokens:,} tokens")


def read_prompts(text: str, name: str) -> Iterator[Prompt]:
    """The prompts of a file; empty lines are none.

    Raises:
        PromptsError: a line that is none of the three forms.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            raise PromptsError(
                f'{name}, line {number}: no JSON; write "a text" in double quotes, or {{"prompt": "a text"}}'
            ) from None
        prompt = value.get("prompt") if isinstance(value, dict) else value
        ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
        if not prompt or not (isinstance(prompt, str) or ids):
            raise PromptsError(
                f"{name}, line {number}: neither a text nor a list of token ids; write one of them"
            )
        yield prompt


def _warm(vllm: VllmClient, prompts: list[Prompt], salt: str | None, at_a_time: int) -> int:
    tokens = 0
    columns = (
        TextColumn("reading prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=progress_console(), transient=True) as progress,
        ThreadPoolExecutor(at_a_time) as pool,
    ):
        task = progress.add_task("", total=len(prompts), tokens=0)
        running = [pool.submit(vllm.complete, prompt, salt) for prompt in prompts]
        try:
            for ended in as_completed(running):
                tokens += ended.result()
                progress.update(task, advance=1, tokens=tokens)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tokens
