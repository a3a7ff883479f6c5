# SPDX-License-Identifier: Apache-2.0
"""Starts a sample appliance, asks one long question twice and, after a restart, once more; says what the
cache made of it, and stops it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

import httpx

from demo import report
from demo.admin import AdminClient
from demo.appliance import Appliance
from demo.documents import own_documents
from demo.server import Answer, DemoError, VllmClient
from kvcache_operator.local.report import RunReport

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "build" / "demo.json"
DISK = "build/demo-kv"
"""Stands for the claim of the disk tier; empty at the start of a demo."""
PROMPT_TOKENS = 3100
"""Twelve chunks of 256 tokens and a tail that is always computed: a minute of work for two cores."""


class Session:
    """Asks one running appliance, and its admin what the cache made of it."""

    def __init__(self, run: RunReport) -> None:
        self.vllm = VllmClient(run.completions_url.removesuffix("/v1"), run.served_name)
        self.admin = AdminClient(run.admin_url, Path(run.token_file).read_text().strip())

    def __enter__(self) -> Session:
        say("warming up with a short question")
        self.vllm.ask("Name three colours.", max_tokens=8)
        return self

    def __exit__(self, *_: object) -> None:
        self.vllm.close()
        self.admin.close()

    def ask(self, prompt: str) -> tuple[Answer, int]:
        """The answer, and the tokens of the prompt that the cache gave back."""
        before = self.admin.cache_hit_tokens()
        answer = self.vllm.ask(prompt)
        say(f"first token after {answer.ttft_s:.2f} s")
        return answer, self.admin.cache_hit_tokens() - before


def measure(run: RunReport) -> tuple[str, Answer, Answer, int]:
    """The same prompt before and after vLLM has forgotten its own prefix cache: the prompt, both answers and
    the tokens that the cache gave back."""
    with Session(run) as session:
        prompt = session.vllm.prompt_of(own_documents(ROOT), PROMPT_TOKENS)
        say(f"asking about this repository's documents, {PROMPT_TOKENS:,} tokens; vLLM has never seen them")
        cold, _ = session.ask(prompt)
        say("now vLLM forgets its own prefix cache, and is asked the same again")
        session.admin.flush("gpu")
        hit, hit_tokens = session.ask(prompt)
    return prompt, cold, hit, hit_tokens


def measure_restart(run: RunReport, prompt: str, cold: Answer, hit: Answer, hit_tokens: int) -> report.Result:
    """The same prompt once more, to a vLLM that has just begun."""
    with Session(run) as session:
        say("asking the new process the same: only the disk has seen it")
        again, restart_hit_tokens = session.ask(prompt)
    return report.Result(
        prompt_tokens=hit.prompt_tokens,
        hit_tokens=hit_tokens,
        cold_ttft_s=round(cold.ttft_s, 4),
        hit_ttft_s=round(hit.ttft_s, 4),
        identical_output=cold.text == hit.text == again.text,
        restart_hit_tokens=restart_hit_tokens,
        restart_ttft_s=round(again.ttft_s, 4),
    )


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def how_to_try(run: RunReport) -> str:
    """Addresses, and commands to copy."""
    token_file = os.path.relpath(run.token_file, ROOT)
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": run.served_name, "messages": [question], "temperature": 0})
    return "\n".join(
        [
            f"  vLLM   {run.completions_url}",
            f"  admin  {run.admin_url}",
            "",
            f"  curl -s {run.completions_url}/chat/completions -H 'Content-Type: application/json' \\",
            f"    -d '{body}'",
            f'  curl -s {run.admin_url}/v1/stats -H "Authorization: Bearer $(cat {token_file})"',
        ]
    )


def demonstrate(*, keep: bool) -> None:
    """The whole demo.

    Raises:
        DemoError: a step failed; nothing that was started here runs on.
    """
    appliance = Appliance(
        ROOT, "manifests/samples/smollm2-disk.yaml", "smollm2-disk", {"models": "build/models", "kv": DISK}
    )
    shutil.rmtree(ROOT / DISK, ignore_errors=True)
    (ROOT / DISK).mkdir(parents=True)
    say("starting vLLM with the cache, and the admin sidecar")
    run = appliance.up()
    running, keeping = True, False
    try:
        measured = measure(run)
        say("stopping all of it, and starting it anew on the same disk")
        appliance.down()
        running = False
        run = appliance.up()
        running = True
        result = measure_restart(run, *measured)
        RESULT.parent.mkdir(exist_ok=True)
        report.write(result, RESULT)
        print(f"\n{report.table(result)}\n\n{how_to_try(run)}\n", flush=True)
        say(f"written to {RESULT.relative_to(ROOT)}")
        shortfall = report.shortfall(result)
        if shortfall is not None:
            raise DemoError(shortfall)
        keeping = keep
    finally:
        if running and not keeping:
            say("stopping")
            appliance.down()
    if keeping:
        say(f"left running; end it with: {appliance.down_command}")
    else:
        say("done; make demo KEEP=1 leaves it running, to try the addresses above")


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the appliance running")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    os.chdir(ROOT)
    try:
        demonstrate(keep=arguments.keep)
    except (DemoError, httpx.HTTPError, OSError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
