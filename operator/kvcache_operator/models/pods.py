# SPDX-License-Identifier: Apache-2.0
"""What a pod asks of the cluster: resources, places, and how it is replaced."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from kvcache_operator.models.access import LabelKey, LabelValue
from kvcache_operator.models.base import PRESERVED, Part, rules
from kvcache_operator.models.measures import CpuAmount, Quantity

_MOVES = "maxSurge and maxUnavailable cannot both be 0: no pod could ever be replaced"


class Amounts(Part):
    """Amounts of the engine's container."""

    cpu: CpuAmount | None = None
    """Processors."""
    memory: Quantity | None = None
    """Host memory, the CPU tier and /dev/shm included."""
    ephemeral_storage: Quantity | None = Field(default=None, alias="ephemeral-storage")
    """Disk of the node, an emptyDir of the disk tier included."""


class ResourcesSpec(Part):
    """What the engine's container asks for. What is not written is computed from tiers and ranks, and shown
    in `status.budget`."""

    gpu_resource_name: str = Field(
        default="nvidia.com/gpu",
        min_length=3,
        max_length=253,
        pattern=r"^[a-z0-9.-]+/[a-zA-Z0-9._-]+$",
    )
    """Name of the GPUs as the device plugin has it; one is asked for each rank."""
    requests: Amounts = Amounts()
    """What the scheduler sets aside."""
    limits: Amounts = Amounts()
    """What the container cannot go beyond; memory and disk must hold at least the computed budget."""


class Toleration(Part):
    """Lets pods on nodes with a taint."""

    key: LabelKey | None = None
    """Key of the taint; without it all, and `operator` must be Exists."""
    operator: Literal["Exists", "Equal"] | None = None
    """How the value is compared. Default: Equal."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; without it all."""
    toleration_seconds: int | None = Field(default=None, ge=0)
    """How long a pod stays after a taint with NoExecute appeared."""


class Requirement(Part):
    """A condition on labels."""

    key: LabelKey
    """Key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How it is compared; Gt and Lt are for labels of nodes."""
    values: tuple[LabelValue, ...] = Field(default=(), max_length=64, strict=False)
    """Values that it is compared with."""


class LabelSelector(Part):
    """Objects with these labels."""

    match_labels: dict[LabelKey, LabelValue] = Field(default={}, max_length=32)
    """Labels and their values, all of which must be there."""
    match_expressions: tuple[Requirement, ...] = Field(default=(), max_length=16, strict=False)
    """Conditions, all of which must hold."""


class NodeTerm(Part):
    """Conditions on a node, all of which must hold."""

    match_expressions: tuple[Requirement, ...] = Field(default=(), max_length=16, strict=False)
    """Conditions on its labels."""
    match_fields: tuple[Requirement, ...] = Field(default=(), max_length=16, strict=False)
    """Conditions on its fields."""


class PreferredNode(Part):
    """A preference for nodes."""

    weight: int = Field(ge=1, le=100)
    """How much it counts."""
    preference: NodeTerm
    """Which nodes."""


class NodeTerms(Part):
    """Nodes that meet one of the terms."""

    node_selector_terms: tuple[NodeTerm, ...] = Field(min_length=1, max_length=16, strict=False)
    """The terms."""


class NodeAffinity(Part):
    """Which nodes pods run on."""

    required_during_scheduling_ignored_during_execution: NodeTerms | None = None
    """Nodes that are possible."""
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNode, ...] = Field(
        default=(), max_length=16, strict=False
    )
    """Nodes that are better."""


class PodTerm(Part):
    """Pods, and what a place is."""

    label_selector: LabelSelector
    """Which pods."""
    topology_key: LabelKey
    """Label of nodes that makes a place: nodes of equal value are one."""
    namespaces: tuple[LabelValue, ...] = Field(default=(), max_length=16, strict=False)
    """Namespaces of those pods; without any, the resource's own."""


class PreferredPods(Part):
    """A preference about other pods."""

    weight: int = Field(ge=1, le=100)
    """How much it counts."""
    pod_affinity_term: PodTerm
    """Which pods, and what a place is."""


class PodAffinity(Part):
    """Which other pods to be near to, or away from."""

    required_during_scheduling_ignored_during_execution: tuple[PodTerm, ...] = Field(
        default=(), max_length=16, strict=False
    )
    """What must hold."""
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPods, ...] = Field(
        default=(), max_length=16, strict=False
    )
    """What is better."""


class Affinity(Part):
    """Where pods go."""

    node_affinity: NodeAffinity | None = None
    """Which nodes."""
    pod_affinity: PodAffinity | None = None
    """Near to which pods."""
    pod_anti_affinity: PodAffinity | None = None
    """Away from which pods."""


class SpreadConstraint(Part):
    """How pods spread over places. The selector is that of the resource's pods."""

    max_skew: int = Field(default=1, ge=1, le=64)
    """How many more pods one place may have than another."""
    topology_key: LabelKey
    """Label of nodes that makes a place."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "ScheduleAnyway"
    """What happens where it cannot be met."""


class RolloutSpec(Part):
    """How pods are replaced. A StatefulSet (see `claimTemplate`) replaces one at a time in any case."""

    model_config = ConfigDict(
        json_schema_extra=rules(("self.maxSurge > 0 || self.maxUnavailable > 0", _MOVES, ".maxUnavailable"))
    )

    max_surge: int = Field(default=0, ge=0, le=64)
    """Pods above `replicas` while they are replaced; each needs GPUs of its own."""
    max_unavailable: int = Field(default=1, ge=0, le=64)
    """Pods that may be missing meanwhile."""

    @model_validator(mode="after")
    def _moves(self) -> RolloutSpec:
        if self.max_surge == 0 and self.max_unavailable == 0:
            raise ValueError(_MOVES)
        return self


class DisruptionSpec(Part):
    """Protection against draining all nodes at once."""

    mode: Literal["Auto", "Disabled"] = "Auto"
    """Auto lets one pod go at a time where there are several replicas."""


class TemplateMetadata(Part):
    """More metadata of pods."""

    labels: dict[LabelKey, LabelValue] = Field(default={}, max_length=32)
    """Labels; those that select the pods cannot be changed."""
    annotations: dict[LabelKey, Annotated[str, Field(max_length=4096)]] = Field(default={}, max_length=32)
    """Annotations."""


class PodTemplate(Part):
    """What is laid over the pod that the operator makes."""

    metadata: TemplateMetadata = TemplateMetadata()
    """More metadata."""
    spec: dict[str, Any] = Field(default={}, json_schema_extra=PRESERVED)
    """Part of a pod's spec. Mappings merge; containers, volumes, variables and mounts merge by their names;
    other lists are replaced. Commands and arguments of the containers `vllm` and `admin` stay."""
