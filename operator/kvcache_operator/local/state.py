# SPDX-License-Identifier: Apache-2.0
"""What is known of a local run, in one file: written by `up` at first, then by the supervisor alone."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from kvcache_operator.local.errors import LocalError
from kvcache_operator.local.memory import SharedFile
from kvcache_operator.local.pod import LocalPod
from kvcache_operator.local.procfs import ProcessId, Trace

MARKER = "KVCACHE_LOCAL_RUN"
"""Variable in the environment of every process of a run; its value names the run and the container."""


class Phase(StrEnum):
    """Where a run, or one container of it, stands."""

    STARTING = "Starting"
    READY = "Ready"
    NOT_READY = "NotReady"
    WAITING = "Waiting"
    """A container has ended and is started again after a back-off."""
    STOPPED = "Stopped"
    FAILED = "Failed"


class ContainerState(BaseModel):
    """One container."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    phase: Phase = Phase.STARTING
    process: ProcessId | None = None
    restarts: int = 0
    detail: str = ""
    """The answer of a probe that fails now."""
    last_end: str = ""
    """How the last process ended."""


class RunState(BaseModel):
    """One run."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    name: str
    run_id: str
    """Random; tells the processes of this run from those of any other."""
    phase: Phase = Phase.STARTING
    reason: str = ""
    """Why the run failed."""
    culprit: str = ""
    """The container that made it fail, if it was one."""
    was_ready: bool = False
    """Ready once: from then on a container that ends is started again instead of ending the run."""
    starter: ProcessId
    """The `up` that waits for it: if that goes before the run is ready, the run ends."""
    supervisor: ProcessId | None = None
    pod: LocalPod
    containers: dict[str, ContainerState]
    volumes: str
    """Folder with the volumes, removed at the end."""
    shared_memory: set[SharedFile] = set()
    """What the processes were seen to have open in /dev/shm."""
    completions_url: str
    admin_url: str
    served_name: str
    token_file: str

    @property
    def traces(self) -> list[Trace]:
        """What the run's processes are known by."""
        return [self.trace(name) for name in self.containers]

    def trace(self, container: str) -> Trace:
        """What the processes of one container are known by."""
        return Trace(marker=f"{MARKER}={self.marker(container)}", leader=self.containers[container].process)

    def marker(self, container: str) -> str:
        """The value of the variable MARKER in a container."""
        return f"{self.run_id}/{container}"


class StateFolder:
    """The folder of a run: its state and its logs, and its volumes where their paths are short enough."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.file = self.path / "state.json"
        self.logs = self.path / "logs"

    @classmethod
    def default(cls, name: str) -> Self:
        """Where the run of a resource is kept unless the user says otherwise."""
        return cls(default_root() / name)

    def log(self, container: str) -> Path:
        """Output of a container."""
        return self.logs / f"{container}.log"

    def read(self) -> RunState | None:
        """The state, or None where there is no run.

        Raises:
            LocalError: the file cannot be read or is of another version.
        """
        try:
            return RunState.model_validate_json(self.file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise LocalError(
                f"{self.file} cannot be read ({type(error).__name__}); end its processes and remove it"
            ) from error

    def write(self, state: RunState) -> None:
        """Replaces the state; a reader finds the old or the new one, never a part."""
        new = self.file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(state.model_dump_json(indent=1))
        new.replace(self.file)


def default_root() -> Path:
    """The folder of all runs that were started from this working folder."""
    return Path("build") / "local"
