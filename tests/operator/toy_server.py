# SPDX-License-Identifier: Apache-2.0
"""A container's process for tests of the local runner: answers probes, and leaves as much behind as vLLM can.

Prints one JSON line with what it was given (arguments, environment, files), then serves.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

FOREVER = [sys.executable, "-c", "import time; time.sleep(600)"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--exit-code", type=int, help="end at once with this code")
    parser.add_argument("--not-ready", action="store_true", help="answer 503 on /readyz")
    parser.add_argument("--deaf", action="store_true", help="never listen")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--socket", help="leave a unix socket with this path")
    parser.add_argument("--leave-behind", action="store_true", help="start children and shared memory")
    parser.add_argument("--read", action="append", default=[], help="print the content of this file")
    options = parser.parse_args()
    given: dict[str, object] = {
        "argv": sys.argv[1:],
        "env": dict(os.environ),
        "folder": str(Path.cwd()),
        "files": {path: Path(path).read_text() for path in options.read},
    }
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.exit_code is not None:
        say("this is why it ends")
        sys.exit(options.exit_code)
    if options.socket:
        Path(options.socket).unlink(missing_ok=True)
        socket.socket(socket.AF_UNIX).bind(options.socket)
    if options.leave_behind:
        given |= leave_behind()
    say(json.dumps(given))
    if options.deaf:
        signal.pause()
    serve(options.host, options.port, options.not_ready)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def leave_behind() -> dict[str, object]:
    """Children of each kind that is hard to find again, and shared memory that nobody will remove."""
    children = {
        # In our session, but with nothing of ours in its environment, like a process that has set its title.
        "nameless": subprocess.Popen(FOREVER, env={}).pid,
        # In a session of its own, but with our environment.
        "runaway": subprocess.Popen(FOREVER, start_new_session=True).pid,
    }
    memory = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]
    # Mapped as long as this process lives.
    globals()["memory"] = memory
    return {"children": children, "shared_memory": f"/dev/shm/{memory.name}"}


def serve(host: str, port: int, not_ready: bool) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            bad = not_ready and self.path == "/readyz"
            self.send_response(503 if bad else 200)
            self.end_headers()
            self.wfile.write(b"rank 0 is missing" if bad else b"ok")

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer((host, port), Handler).serve_forever()


if __name__ == "__main__":
    main()
