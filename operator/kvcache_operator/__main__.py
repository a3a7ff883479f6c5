# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m kvcache_operator {run,render,crd,reference,local}`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcache_operator.crd import crd
from kvcache_operator.errors import ResourceError
from kvcache_operator.local.down import runs, stop
from kvcache_operator.local.errors import LocalError
from kvcache_operator.local.report import report
from kvcache_operator.local.state import Phase, StateFolder
from kvcache_operator.local.up import up
from kvcache_operator.parse import parse_file
from kvcache_operator.plan import make_plan
from kvcache_operator.reference import reference
from kvcache_operator.render import render
from kvcache_operator.settings import Settings
from kvcache_operator.yaml_text import to_yaml

_INTERRUPTED = 130
"""What a shell reports for a program that Ctrl-C ended."""
_PIPE_CLOSED = 141
"""What a shell reports for a program that ended since nobody reads its output."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
    except (ResourceError, LocalError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever reads the output has enough of it. What is left of it must not fail at exit again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcache_operator", description="The operator of KVCache resources."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "run", help="run the operator on the cluster that KUBECONFIG names, or in a pod"
    )
    command.set_defaults(command=_run)

    command = commands.add_parser("render", help="print the Kubernetes objects of a resource")
    _add_file(command)
    command.set_defaults(command=_render)

    command = commands.add_parser("crd", help="print the CustomResourceDefinition of KVCache")
    command.set_defaults(command=_crd)

    command = commands.add_parser("reference", help="print the page of the resource's fields, as Markdown")
    command.set_defaults(command=_reference)

    local = commands.add_parser("local", help="run a resource on this machine, without a cluster")
    commands = local.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "up", help="start the pod of a resource as processes and wait until it is ready"
    )
    _add_file(command)
    command.add_argument(
        "--claim",
        metavar="NAME=FOLDER",
        action="append",
        default=[],
        type=_claim,
        help="the folder that stands for a PersistentVolumeClaim; may be repeated",
    )
    _add_state(command)
    command.set_defaults(command=_up)

    command = commands.add_parser("down", help="stop a run and remove all of it but its logs")
    command.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the resource; default: all that are up"
    )
    _add_state(command)
    command.set_defaults(command=_down)

    command = commands.add_parser("status", help="show what is up; exit code 0 when all of it is ready")
    command.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the resource; default: all that are up"
    )
    _add_state(command)
    command.add_argument("-o", "--output", choices=["text", "json"], default="text", help="default: text")
    command.set_defaults(command=_status)
    return parser


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--file", metavar="RESOURCE.yaml", required=True, type=Path, help="file with a KVCache"
    )


def _add_state(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state",
        metavar="FOLDER",
        type=Path,
        help="folder of the run's state and logs; default: build/local/NAME",
    )


def _claim(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER")
    return name, Path(folder).absolute()


def _state_folder(options: argparse.Namespace) -> StateFolder | None:
    return StateFolder(options.state) if options.state is not None else None


def _run(_: argparse.Namespace) -> int:
    # Imported here, since a local run has no use for the Kubernetes client, which takes a second to load.
    from kvcache_operator.cluster import ClusterError
    from kvcache_operator.run import run

    try:
        return asyncio.run(run(Settings()))
    except (ClusterError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _render(options: argparse.Namespace) -> int:
    rendered = render(make_plan(parse_file(options.file), Settings()))
    print(to_yaml(*rendered.all), end="")
    return 0


def _crd(_: argparse.Namespace) -> int:
    print(to_yaml(crd()), end="")
    return 0


def _reference(_: argparse.Namespace) -> int:
    print(reference(), end="")
    return 0


def _up(options: argparse.Namespace) -> int:
    resource = parse_file(options.file)
    folder = _state_folder(options) or StateFolder.default(resource.metadata.name)
    up(resource, dict(options.claim), folder, lambda line: print(line, flush=True))
    print(report(folder))
    return 0


def _down(options: argparse.Namespace) -> int:
    stopped = [folder for folder in runs(options.name, _state_folder(options)) if stop(folder)]
    for folder in stopped:
        print(f"stopped {folder.path.name}; its logs stay in {folder.logs}")
    if not stopped:
        print(f"{options.name} is not up" if options.name else "nothing is up")
    return 0


def _status(options: argparse.Namespace) -> int:
    found = [
        run for folder in runs(options.name, _state_folder(options)) if (run := report(folder)) is not None
    ]
    if options.output == "json":
        print(json.dumps([run.model_dump(mode="json") for run in found], indent=1))
    else:
        print("\n".join(str(run) for run in found) or "nothing is up")
    return 0 if found and all(run.phase is Phase.READY for run in found) else 1


if __name__ == "__main__":
    sys.exit(main())
