# SPDX-License-Identifier: Apache-2.0
"""What a resource comes to: names, ports, budgets and the connector's configuration. Pure: no I/O, no clock,
no chance.

Units are bytes, seconds and tokens throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from kvcache.config import LMCacheEngineConfig
from kvcache.config.live import restart_digest
from kvcache_operator import GROUP
from kvcache_operator.errors import ResourceError
from kvcache_operator.models import Device, KVCache, KVCacheSpec
from kvcache_operator.planning.budget import Budget, budget_problems, in_mebibytes, make_budget
from kvcache_operator.planning.checks import block_tokens, problems, warnings
from kvcache_operator.planning.engine_config import config_yaml, engine_config
from kvcache_operator.planning.places import (
    CONFIG_KEY,
    CONFIG_MOUNT,
    DISK_VOLUME,
    GIB,
    HOME,
    MIB,
    PRE_STOP_S,
    RUNTIME_MOUNT,
    TOKEN_KEY,
    TOKEN_MOUNT,
    Names,
    SecretFiles,
    SecretUse,
    secret_files,
    secret_uses,
    termination_grace_s,
)
from kvcache_operator.settings import Settings

__all__ = [
    "CONFIG_KEY",
    "CONFIG_MOUNT",
    "DISK_VOLUME",
    "GIB",
    "HOME",
    "MIB",
    "PRE_STOP_S",
    "RESTART_ANNOTATION",
    "RUNTIME_MOUNT",
    "TOKEN_KEY",
    "TOKEN_MOUNT",
    "Budget",
    "Names",
    "Plan",
    "SecretFiles",
    "SecretUse",
    "in_mebibytes",
    "make_plan",
]

RESTART_ANNOTATION = f"{GROUP}/restart-requested-at"
"""Any new value replaces all pods."""


@dataclass(frozen=True)
class Plan:
    """All that the renderers need; equal for equal resources."""

    namespace: str
    owner_uid: str | None
    """None when no API server knows the resource."""
    names: Names
    spec: KVCacheSpec
    image: str
    block_tokens: int
    budget: Budget
    config: LMCacheEngineConfig
    config_yaml: str
    config_checksum: str
    """On the pod template: of what takes effect at the start alone, so that a change of it rolls the pods.
    The sidecar hands all else to the processes while they run."""
    termination_grace_s: int
    secret_files: tuple[SecretFiles, ...]
    secret_uses: tuple[SecretUse, ...]
    restart: str
    """Value of the annotation by which a restart was asked for; empty without one."""
    warnings: tuple[str, ...]
    operator_namespace: str
    """Namespace of the operator; empty where it runs outside of the cluster."""
    monitoring_namespace: str
    """Namespace that Prometheus scrapes from; empty for any."""

    @property
    def name(self) -> str:
        return self.names.workload

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.spec.model.name

    @property
    def replicas(self) -> int | None:
        """Pods that are wanted; None where something else decides."""
        if self.spec.suspend:
            return 0
        return self.spec.replicas if self.spec.replicas_mode == "Managed" else None

    @property
    def is_stateful(self) -> bool:
        """Whether the workload is a StatefulSet."""
        return self.spec.uses_claim_template

    @property
    def owns_token(self) -> bool:
        """Whether the operator makes the Secret with the admin token."""
        return self.spec.admin.token_secret_ref is None

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Tiers by the names that statistics and flushes know."""
        tiers = self.spec.cache.tiers
        names = ["cpu"]
        if tiers.disk is not None:
            names.append("disk")
        if tiers.remote is not None:
            names.append("remote")
        return (*names, *(plugin.name for plugin in tiers.plugins))

    @property
    def shared_tiers(self) -> tuple[str, ...]:
        """Tiers among them that others may use too, resources of other models included."""
        disk = self.spec.cache.tiers.disk
        is_alone = {"cpu"} if disk is not None and disk.volume.claim_name is not None else {"cpu", "disk"}
        return tuple(name for name in self.tier_names if name not in is_alone)


def make_plan(resource: KVCache, settings: Settings) -> Plan:
    """Decides everything that is not I/O.

    Raises:
        ResourceError: fields that fit by themselves but not together.
    """
    spec, name = resource.spec, resource.metadata.name
    tokens = block_tokens(spec.engine)
    budget = make_budget(spec)
    found = [*problems(spec, tokens), *budget_problems(spec, budget)]
    if found:
        raise ResourceError(found)
    files = secret_files(spec)
    config = engine_config(spec, budget, files)
    text = config_yaml(config, with_seed=spec.cache.seed_secret_ref is None)
    default_image = settings.image_cpu if spec.engine.device is Device.CPU else settings.image_cuda
    image = spec.engine.image or default_image
    return Plan(
        namespace=resource.metadata.namespace,
        owner_uid=resource.metadata.uid,
        names=Names.of(name, spec),
        spec=spec,
        image=image,
        block_tokens=tokens,
        budget=budget,
        config=config,
        config_yaml=text,
        config_checksum=restart_digest(yaml.safe_load(text)),
        termination_grace_s=termination_grace_s(spec),
        secret_files=files,
        secret_uses=secret_uses(spec, files),
        restart=resource.metadata.annotations.get(RESTART_ANNOTATION, ""),
        warnings=warnings(spec, image),
        operator_namespace=settings.namespace,
        monitoring_namespace=settings.monitoring_namespace,
    )
