# SPDX-License-Identifier: Apache-2.0
"""The demo's parts, against a small server that speaks as vLLM does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from demo import __main__ as demo
from demo import report
from demo.documents import own_documents
from demo.server import QUESTION, DemoError, VllmClient

ROOT = Path(__file__).resolve().parents[2]


class _Server(ThreadingHTTPServer):
    """Counts each character as a token and answers with what the test put into `events`."""

    events: tuple[dict[str, Any], ...] = ()
    status = 200
    asked: dict[str, Any]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/chat/completions":
            self.server.asked = body
            lines = [f"data: {json.dumps(event)}\n\n" for event in self.server.events]
            self._answer("".join([*lines, "data: [DONE]\n\n"]), "text/event-stream")
        elif self.path == "/tokenize":
            messages = body.get("messages")
            text = body["prompt"] if messages is None else f"<user>{messages[0]['content']}</user>"
            self._answer(json.dumps({"tokens": [ord(c) for c in text], "count": len(text)}))
        else:
            self._answer(json.dumps({"prompt": "".join(map(chr, body["tokens"]))}))

    def _answer(self, text: str, kind: str = "application/json") -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Keeps the test's output clean."""


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def client(server: _Server) -> Iterator[VllmClient]:
    client = VllmClient(f"http://127.0.0.1:{server.server_port}", "model")
    yield client
    client.close()


def _piece(text: str | None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 17}}


@pytest.mark.parametrize("tokens", [100, 101, 3100])
def test_the_prompt_has_the_asked_length_with_its_template(client: VllmClient, tokens: int) -> None:
    text = own_documents(ROOT)
    prompt = client.prompt_of(text, tokens)
    assert len(f"<user>{prompt}</user>") == tokens
    assert prompt.endswith(QUESTION)
    assert text.startswith(prompt.removesuffix(QUESTION))


def test_an_answer_is_put_together_from_its_stream(client: VllmClient, server: _Server) -> None:
    server.events = (_piece(None), _piece(""), _piece("The "), _piece("cat"), USAGE)
    answer = client.ask("Which?", max_tokens=5)
    assert (answer.text, answer.prompt_tokens) == ("The cat", 17)
    assert answer.ttft_s > 0
    assert server.asked["messages"] == [{"role": "user", "content": "Which?"}]
    assert (server.asked["temperature"], server.asked["max_tokens"]) == (0.0, 5)


@pytest.mark.parametrize(
    ("events", "status", "said"),
    [
        ((USAGE,), 200, "gave no answer"),
        ((_piece("The "), {"error": {"message": "engine dead"}}), 200, "engine dead"),
        ((), 503, "answered 503"),
    ],
)
def test_what_is_no_answer_is_said(
    client: VllmClient, server: _Server, events: tuple[dict[str, Any], ...], status: int, said: str
) -> None:
    server.events, server.status = events, status
    with pytest.raises(DemoError, match=said):
        client.ask("Which?")


def test_the_documents_are_long_enough() -> None:
    text = own_documents(ROOT)
    assert text.startswith((ROOT / "README.md").read_text())
    # Tokens of English and Markdown have some four characters; half as much again leaves room.
    assert len(text) > 6 * demo.PROMPT_TOKENS


def _result(**changes: Any) -> report.Result:
    usual: dict[str, Any] = {"cold_ttft_s": 10.0, "hit_ttft_s": 0.5, "identical_output": True}
    usual |= {"restart_hit_tokens": 2816, "restart_ttft_s": 0.75}
    return report.Result(**{"prompt_tokens": 3000, "hit_tokens": 2816, **usual, **changes})


def test_the_file_holds_what_was_measured(tmp_path: Path) -> None:
    report.write(_result(), tmp_path / "demo.json")
    assert json.loads((tmp_path / "demo.json").read_text()) == {
        "prompt_tokens": 3000,
        "hit_tokens": 2816,
        "cold_ttft_s": 10.0,
        "hit_ttft_s": 0.5,
        "identical_output": True,
        "restart_hit_tokens": 2816,
        "restart_ttft_s": 0.75,
    }


def test_the_table_names_share_and_speed_up() -> None:
    table = report.table(_result())
    assert "2,816 tokens (94%)" in table
    assert "20.0 x" in table


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"hit_tokens": 2700}, None),
        ({"hit_tokens": 2699}, "2699 of 3000 tokens"),
        ({"hit_tokens": 0}, "0 of 3000 tokens"),
        ({"restart_hit_tokens": 2699}, "2699 of 3000 tokens after a restart"),
        ({"identical_output": False}, "answers differ"),
    ],
)
def test_a_cache_that_owes_something_fails_the_demo(changes: dict[str, Any], said: str | None) -> None:
    shortfall = report.shortfall(_result(**changes))
    assert (shortfall is None) if said is None else (shortfall is not None and said in shortfall)


class _Appliance:
    """Stands for the local run; notes whether it was ended."""

    down_command = "local down"

    def __init__(self, *_: object) -> None:
        self.ended = self.begun = 0
        self.fails_at: int | None = None

    def up(self) -> SimpleNamespace:
        self.begun += 1
        if self.begun == self.fails_at:
            raise DemoError("port 8000 is taken")
        url = "http://127.0.0.1:8000"
        return SimpleNamespace(
            completions_url=f"{url}/v1", admin_url=url, served_name="model", token_file=str(ROOT / "token")
        )

    def down(self) -> None:
        self.ended += 1


@pytest.fixture
def appliance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Appliance:
    appliance = _Appliance()
    monkeypatch.setattr(demo, "Appliance", lambda *_: appliance)
    monkeypatch.setattr(demo, "RESULT", tmp_path / "demo.json")
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    return appliance


def _measured(monkeypatch: pytest.MonkeyPatch, result: report.Result) -> None:
    monkeypatch.setattr(demo, "measure", lambda _: ("prompt",))
    monkeypatch.setattr(demo, "measure_restart", lambda *_: result)


@pytest.mark.parametrize(("keep", "ended"), [(False, 2), (True, 1)])
def test_a_good_run_is_ended_unless_it_is_kept(
    appliance: _Appliance, monkeypatch: pytest.MonkeyPatch, keep: bool, ended: int
) -> None:
    _measured(monkeypatch, _result())
    demo.demonstrate(keep=keep)
    assert appliance.ended == ended
    assert demo.RESULT.exists()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("failure", [DemoError("no answer"), KeyboardInterrupt()])
def test_a_failed_run_is_always_ended(
    appliance: _Appliance, monkeypatch: pytest.MonkeyPatch, keep: bool, failure: BaseException
) -> None:
    def fail(_: object) -> report.Result:
        raise failure

    monkeypatch.setattr(demo, "measure", fail)
    with pytest.raises(type(failure)):
        demo.demonstrate(keep=keep)
    assert appliance.ended == 1


def test_a_cache_without_hits_ends_the_run_and_leaves_its_numbers(
    appliance: _Appliance, monkeypatch: pytest.MonkeyPatch
) -> None:
    _measured(monkeypatch, _result(hit_tokens=0))
    with pytest.raises(DemoError, match="0 of 3000"):
        demo.demonstrate(keep=True)
    assert appliance.ended == 2
    assert json.loads(demo.RESULT.read_text())["hit_tokens"] == 0


def test_what_did_not_start_is_not_ended(appliance: _Appliance) -> None:
    appliance.fails_at = 1
    with pytest.raises(DemoError, match="port 8000"):
        demo.demonstrate(keep=False)
    assert appliance.ended == 0


def test_a_restart_that_fails_leaves_nothing_to_end(
    appliance: _Appliance, monkeypatch: pytest.MonkeyPatch
) -> None:
    appliance.fails_at = 2
    _measured(monkeypatch, _result())
    with pytest.raises(DemoError, match="port 8000"):
        demo.demonstrate(keep=False)
    assert appliance.ended == 1
