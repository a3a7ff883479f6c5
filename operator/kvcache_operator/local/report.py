# SPDX-License-Identifier: Apache-2.0
"""`local status`: what is up, for people and programs."""

from __future__ import annotations

from pydantic import BaseModel

from kvcache_operator.local.procfs import traced
from kvcache_operator.local.state import ContainerState, Phase, StateFolder


class ContainerReport(BaseModel):
    """One container."""

    phase: Phase
    pid: int | None
    restarts: int
    detail: str
    last_end: str


class RunReport(BaseModel):
    """One run."""

    name: str
    phase: Phase
    reason: str
    completions_url: str
    admin_url: str
    served_name: str
    token_file: str
    logs: str
    containers: dict[str, ContainerReport]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.phase}" + (f", {self.reason}" if self.reason else "")]
        for name, container in self.containers.items():
            line = f"  {name:8} {container.phase:9} pid {container.pid or '-'}, restarts {container.restarts}"
            notes = [container.detail, f"last process {container.last_end}" if container.last_end else ""]
            lines.append(", ".join([line, *(note for note in notes if note)]))
        lines += [
            f"  completions  {self.completions_url}  (model {self.served_name})",
            f"  admin        {self.admin_url}  (token in {self.token_file})",
            f"  logs         {self.logs}",
        ]
        return "\n".join(lines)


def report(folder: StateFolder) -> RunReport | None:
    """The state of a run, or None where there is none.

    Raises:
        LocalError: the state cannot be read.
    """
    state = folder.read()
    if state is None:
        return None
    phase, reason = state.phase, state.reason
    is_supervised = state.supervisor is not None and state.supervisor.is_alive
    if not is_supervised and phase not in (Phase.FAILED, Phase.STOPPED):
        left = len(traced(state.traces))
        phase = Phase.FAILED
        reason = f"its supervisor has gone and left {left} processes behind; run `local down {state.name}`"
    return RunReport(
        name=state.name,
        phase=phase,
        reason=reason,
        completions_url=state.completions_url,
        admin_url=state.admin_url,
        served_name=state.served_name,
        token_file=state.token_file,
        logs=str(folder.logs),
        containers={name: _container(record) for name, record in state.containers.items()},
    )


def _container(record: ContainerState) -> ContainerReport:
    is_alive = record.process is not None and record.process.is_alive
    # Dead but not yet noticed by the supervisor.
    phase = Phase.WAITING if not is_alive and record.phase in (Phase.READY, Phase.NOT_READY) else record.phase
    return ContainerReport(
        phase=phase,
        pid=record.process.pid if record.process is not None and is_alive else None,
        restarts=record.restarts,
        detail=record.detail,
        last_end=record.last_end,
    )
