# SPDX-License-Identifier: Apache-2.0
"""Starts the sample appliance, asks one long question twice, says what the cache made of it, and stops it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import httpx

from demo import report
from demo.admin import AdminClient
from demo.appliance import Appliance
from demo.documents import own_documents
from demo.server import DemoError, VllmClient
from kvcache_operator.local.report import RunReport

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "build" / "demo.json"
PROMPT_TOKENS = 3100
"""Twelve chunks of 256 tokens and a tail that is always computed: a minute of work for two cores."""


def measure(run: RunReport) -> report.Result:
    """The same prompt before and after vLLM has forgotten its own prefix cache."""
    vllm = VllmClient(run.completions_url.removesuffix("/v1"), run.served_name)
    admin = AdminClient(run.admin_url, Path(run.token_file).read_text().strip())
    try:
        say("warming up with a short question")
        vllm.ask("Name three colours.", max_tokens=8)
        prompt = vllm.prompt_of(own_documents(ROOT), PROMPT_TOKENS)
        say(f"asking about this repository's documents, {PROMPT_TOKENS:,} tokens; vLLM has never seen them")
        cold = vllm.ask(prompt)
        say(f"first token after {cold.ttft_s:.2f} s; now vLLM forgets its own prefix cache")
        admin.flush("gpu")
        before = admin.cache_hit_tokens()
        say("asking the same again")
        hit = vllm.ask(prompt)
        say(f"first token after {hit.ttft_s:.2f} s")
        return report.Result(
            prompt_tokens=hit.prompt_tokens,
            hit_tokens=admin.cache_hit_tokens() - before,
            cold_ttft_s=round(cold.ttft_s, 4),
            hit_ttft_s=round(hit.ttft_s, 4),
            identical_output=cold.text == hit.text,
        )
    finally:
        vllm.close()
        admin.close()


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
    appliance = Appliance(ROOT, "manifests/samples/smollm2.yaml", "smollm2")
    say("starting vLLM with the cache, and the admin sidecar")
    run = appliance.up()
    keeping = False
    try:
        result = measure(run)
        RESULT.parent.mkdir(exist_ok=True)
        report.write(result, RESULT)
        print(f"\n{report.table(result)}\n\n{how_to_try(run)}\n", flush=True)
        say(f"written to {RESULT.relative_to(ROOT)}")
        shortfall = report.shortfall(result)
        if shortfall is not None:
            raise DemoError(shortfall)
        keeping = keep
    finally:
        if not keeping:
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
