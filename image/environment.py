# SPDX-License-Identifier: Apache-2.0
"""Makes the virtual environment `.venv` from the lock and builds the native module into it: `make setup`.

Runs on the system's Python before anything is installed, hence the standard library alone. Both halves are
keyed by a digest of what they are made from: a second run does nothing, an interrupted one is taken up again.

    python image/environment.py [--rebuild]

Environment:
    TORCH_INDEX_URL: a package index that carries the CPU build of torch, asked when the usual one does not.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "image" / "requirements-cpu.lock"
BUILD = ROOT / "build"
LOG = BUILD / "setup.log"
TORCH = "2.13.0"
HEARTBEAT_S = 15.0
NATIVE_REPORT = """
from kvcache._native import build_info
info = build_info()
cuda = "with CUDA for " + " ".join(info["architectures"])
print(cuda if info["cuda"] else "without CUDA, since there is no nvcc")
"""


class SetupError(Exception):
    """A step failed. The text says which one and where to read on."""


def digest(parts: Iterable[bytes]) -> str:
    """Hex digest over the parts; their boundaries count."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def environment_key() -> str:
    """What the installed packages depend on: the lock, this script and the interpreter."""
    return digest([LOCK.read_bytes(), Path(__file__).read_bytes(), sys.version.encode()])


def native_key() -> str:
    """What the native module and the entry points depend on: csrc/, the build files, the compiler of CUDA."""
    files = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"]
    files += sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    parts = [part for path in files for part in (str(path.relative_to(ROOT)).encode(), path.read_bytes())]
    return digest([*parts, str(shutil.which("nvcc")).encode(), environment_key().encode()])


def succeeds(title: str, command: Sequence[str | Path]) -> bool:
    """Runs a command with its output in the log and without input; says that it lives every 15 seconds."""
    print(f"==> {title}", flush=True)
    started = time.monotonic()
    with LOG.open("ab") as log:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        while True:
            try:
                return process.wait(HEARTBEAT_S) == 0
            except subprocess.TimeoutExpired:
                print(f"    {time.monotonic() - started:4.0f} s: {_last_line()}", flush=True)
            except BaseException:
                process.kill()
                process.wait()
                raise


def step(title: str, command: Sequence[str | Path]) -> None:
    """`succeeds`, or the end of the set-up.

    Raises:
        SetupError: the command's exit code is not 0; the log's last lines are printed before.
    """
    if not succeeds(title, command):
        print("\n".join(LOG.read_text(errors="replace").splitlines()[-25:]), file=sys.stderr)
        raise SetupError(
            f"{title} failed; the last lines stand above, all of them in {LOG.relative_to(ROOT)}"
        )


def _last_line() -> str:
    with LOG.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if not line.startswith("WARNING")), "")[:100]


def pip(*arguments: str | Path) -> list[str | Path]:
    """The command line of the environment's own pip."""
    return [
        PYTHON,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--progress-bar",
        "off",
        *arguments,
    ]


def make_venv() -> None:
    """A virtual environment of this interpreter; one of another version or with a lost base is replaced."""
    probe = [str(PYTHON), "-c", "import sys, pip; print(sys.version)"]
    if PYTHON.exists():
        found = subprocess.run(probe, capture_output=True, text=True, check=False)
        if found.returncode == 0 and found.stdout.strip() == sys.version.strip():
            return
    step(
        f"making {VENV.name} of Python {sys.version.split()[0]}",
        [sys.executable, "-m", "venv", "--clear", VENV],
    )


def installed_torch() -> str | None:
    """Version of torch in the environment, such as `2.13.0+cpu`; None without it."""
    code = "from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def install_torch() -> None:
    """The CPU build, from the usual index or the one that the user names; else the default one with CUDA."""
    version = installed_torch()
    if version is None or version.split("+")[0] != TORCH:
        index = os.environ.get("TORCH_INDEX_URL")
        if succeeds(f"installing torch {TORCH}+cpu", pip("--no-deps", f"torch=={TORCH}+cpu")):
            pass
        elif index is not None:
            title = f"installing torch {TORCH} from TORCH_INDEX_URL, since the usual index has no CPU build"
            step(title, pip("--no-deps", "--index-url", index, f"torch=={TORCH}"))
        else:
            title = (
                f"installing torch {TORCH} with CUDA (some 4 GB more), since the usual index has no CPU build"
            )
            step(title, pip("--constraint", LOCK, f"torch=={TORCH}"))
            # 1 GB that compiles for GPUs; the lock leaves it out too.
            step(
                "removing triton, which a CPU has no use for",
                [PYTHON, "-m", "pip", "uninstall", "--yes", "triton"],
            )
        version = installed_torch()
    if version is not None and version.endswith("+cpu"):
        print(f"    torch {version}, the small CPU build", flush=True)
    else:
        print(
            f"    torch {version}, no CPU build; TORCH_INDEX_URL may name an index that has one", flush=True
        )


def install_packages() -> None:
    make_venv()
    install_torch()
    step("installing the locked packages", pip("--no-deps", "--requirement", LOCK))


def build_native() -> None:
    """Compiles csrc/ and installs the project editable: Python sources are used where they lie."""
    command = pip("--no-deps", "--no-build-isolation", "--force-reinstall", "--verbose", "--editable", ROOT)
    step("building the native module", command)
    found = subprocess.run([str(PYTHON), "-c", NATIVE_REPORT], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise SetupError(f"the native module was built and does not load: {found.stderr.strip()[-300:]}")
    print(f"    kvcache._native {found.stdout.strip()}", flush=True)


@contextmanager
def alone() -> Iterator[None]:
    """Keeps two set-ups of one checkout from writing into each other."""
    with (BUILD / "setup.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def once(stamp: Path, key: str, work: Callable[[], None], *, force: bool = False) -> bool:
    """Does the work unless the stamp says that it was done for this key; the stamp is written last."""
    if not force and stamp.exists() and stamp.read_text() == key:
        return False
    stamp.unlink(missing_ok=True)
    work()
    stamp.write_text(key)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Makes .venv from the lock and builds the native module into it."
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="build the native module although nothing changed"
    )
    arguments = parser.parse_args()
    BUILD.mkdir(exist_ok=True)
    try:
        with alone():
            LOG.unlink(missing_ok=True)
            LOG.touch()
            started = time.monotonic()
            changed = once(VENV / "packages.stamp", environment_key(), install_packages)
            changed |= once(VENV / "native.stamp", native_key(), build_native, force=arguments.rebuild)
            took = f"ready after {time.monotonic() - started:.0f} s" if changed else "up to date"
            print(f"{VENV.name}: {took}", flush=True)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the next run takes it up again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
