# SPDX-License-Identifier: Apache-2.0
"""What is rendered: golden files of whole manifests, and properties that hold for all of them.

`GOLDEN=write python -m pytest tests/operator/test_render.py` writes them anew; look at the change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from kvcache.config import load_config
from kvcache_operator.render import Kinds
from kvcache_operator.render.secret import with_token
from kvcache_operator.yaml_text import to_yaml
from tests.operator.full import BIG, FULL
from tests.operator.resources import (
    SAMPLES,
    SMALLEST,
    containers_of,
    objects_of,
    pod_of,
    rendered_of,
    with_value,
)

GOLDEN = Path(__file__).parent / "golden"
KUBERNETES = "1.37"

CASES = {path.stem: yaml.safe_load(path.read_text()) for path in SAMPLES}
CASES |= {document["metadata"]["name"]: document for document in FULL}
RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"} | {
    "persistentVolumeClaim",
    "projected",
    "secret",
}
ALL_KINDS = Kinds(pod_monitor=True, service_monitor=True)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    text = to_yaml(*objects_of(CASES[name]))
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()


def test_rendering_is_stable() -> None:
    assert to_yaml(*objects_of(BIG)) == to_yaml(*objects_of(json.loads(json.dumps(BIG))))


@pytest.mark.parametrize("name", CASES)
def test_objects_are_valid_kubernetes(name: str) -> None:
    for manifest in objects_of(CASES[name]):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_validation_would_find_a_misspelt_field() -> None:
    deployment = rendered_of(BIG).workload
    pod = deployment["spec"]["template"]["spec"]
    pod["enableServiceLink"] = pod.pop("enableServiceLinks")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", CASES)
def test_pods_pass_the_restricted_profile(name: str) -> None:
    rendered = rendered_of(CASES[name])
    pod = pod_of(rendered)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert not {"seLinuxOptions", "sysctls", "windowsOptions"} & pod["securityContext"].keys()
    for container in pod["containers"]:
        if container["name"] not in ("vllm", "admin"):
            continue  # the user's own, which is warned about
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        assert not {"privileged", "procMount", "seLinuxOptions"} & security.keys()
        assert not any("hostPort" in port for port in container.get("ports", ()))
    for volume in pod["volumes"]:
        assert volume.keys() - {"name"} <= RESTRICTED_VOLUMES


@pytest.mark.parametrize("name", CASES)
def test_mounts_ports_and_variables_fit_together(name: str) -> None:
    rendered = rendered_of(CASES[name])
    volumes = [volume["name"] for volume in pod_of(rendered)["volumes"]]
    assert len(volumes) == len(set(volumes))
    ports: dict[str, int] = {}
    assert {"vllm", "admin"} <= containers_of(rendered).keys()
    for name in ("vllm", "admin"):
        container = containers_of(rendered)[name]
        variables = [entry["name"] for entry in container["env"]]
        assert len(variables) == len(set(variables))
        assert {mount["name"] for mount in container["volumeMounts"]} <= {*volumes, "disk"}
        ports |= {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in {port["name"] for port in container["ports"]}
    assert len(set(ports.values())) == len(ports) >= 2
    for service in (entry for entry in rendered.applied if entry["kind"] == "Service"):
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    template = rendered.workload["spec"]["template"]["metadata"]["labels"]
    for selector in (
        rendered.service["spec"]["selector"],
        rendered.workload["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= template.items()


@pytest.mark.parametrize("name", CASES)
def test_every_cache_folder_is_writable(name: str) -> None:
    """With a read-only root, each folder that a variable names must lie in a mount that can be written to."""
    engine = containers_of(rendered_of(CASES[name]))["vllm"]
    writable = [mount["mountPath"] for mount in engine["volumeMounts"] if not mount.get("readOnly")]
    folders = [
        entry["value"]
        for entry in engine["env"]
        if entry["name"] in ("HOME", "TMPDIR", "HF_HOME")
        or entry["name"].endswith(("_CACHE_HOME", "_ROOT", "_DIR"))
    ]
    assert len(folders) >= 8
    for folder in [*folders, engine["workingDir"]]:
        assert any(folder == mount or folder.startswith(f"{mount}/") for mount in writable), folder


@pytest.mark.parametrize("name", CASES)
def test_times_leave_room_for_each_other(name: str) -> None:
    document = CASES[name]
    rendered = rendered_of(document)
    engine = containers_of(rendered)["vllm"]
    flags = dict(zip(engine["args"], engine["args"][1:], strict=False))
    pre_stop = int(engine["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod_of(rendered)["terminationGracePeriodSeconds"] > pre_stop + int(flags["--shutdown-timeout"])
    startup = engine["startupProbe"]["periodSeconds"] * engine["startupProbe"]["failureThreshold"]
    assert rendered.workload["spec"].get("progressDeadlineSeconds", startup + 1) > startup
    assert startup >= (5400 if document in FULL else 1800)


def test_a_new_configuration_rolls_the_pods_and_a_new_token_does_not() -> None:
    def checksum(document: dict[str, Any]) -> str:
        annotations = rendered_of(document).workload["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["kvcache.dev/config-checksum"])

    assert checksum(SMALLEST) != checksum(with_value(SMALLEST, "spec.cache.chunkTokens", 128))
    assert checksum(SMALLEST) == checksum(with_value(SMALLEST, "spec.replicas", 2))
    rendered = rendered_of(SMALLEST)
    assert rendered.token_secret is not None
    assert "data" not in rendered.token_secret
    assert "stringData" not in rendered.token_secret
    assert with_token(rendered.token_secret, "ab")["data"] == {"token": "YWI="}


def test_all_pods_hash_alike() -> None:
    engine = containers_of(rendered_of(SMALLEST))["vllm"]
    assert {"name": "PYTHONHASHSEED", "value": "0"} in engine["env"]


def test_users_variables_replace_defaults() -> None:
    env = {entry["name"]: entry for entry in containers_of(rendered_of(BIG))["vllm"]["env"]}
    assert env["VLLM_NO_USAGE_STATS"] == {"name": "VLLM_NO_USAGE_STATS", "value": "0"}
    assert env["TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert env["ADDRESS"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_no_download_for_a_folder_and_downloads_on_the_claim() -> None:
    def engine(model: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        container = containers_of(rendered_of(with_value(SMALLEST, "spec.model", model)))["vllm"]
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        return env, {mount["name"]: mount for mount in container["volumeMounts"]}

    env, mounts = engine({"name": "/models/m", "volume": {"claimName": "c"}})
    assert env["HF_HUB_OFFLINE"] == "1"
    assert mounts["models"]["readOnly"] is True
    env, mounts = engine({"name": "org/m", "volume": {"claimName": "c"}})
    assert "HF_HUB_OFFLINE" not in env
    assert env["HF_HOME"].startswith("/models/")
    assert mounts["models"]["readOnly"] is False
    env, mounts = engine({"name": "org/m"})
    assert "models" not in mounts


def test_the_connector_finds_its_configuration(tmp_path: Path) -> None:
    rendered = rendered_of(BIG)
    engine = containers_of(rendered)["vllm"]
    flags = dict(zip(engine["args"], engine["args"][1:], strict=False))
    connector = json.loads(flags["--kv-transfer-config"])
    assert connector["kv_role"] == "kv_consumer"
    path = connector["kv_connector_extra_config"]["config_file"]
    mounts = {mount["mountPath"]: mount["name"] for mount in engine["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod_of(rendered)["volumes"]}
    folder, _, key = path.rpartition("/")
    assert volumes[mounts[folder]]["configMap"]["name"] == rendered.config_map["metadata"]["name"]
    file = tmp_path / key
    file.write_text(rendered.config_map["data"][key])
    config = load_config({"config_file": str(file)}, environ={})
    assert config.chunk_size == 512
    assert config.use_layerwise
    assert config.tiers.cpu.capacity * 4 == 100 << 30
    assert config.min_retrieve_tokens == 256
    assert config.runtime_dir in mounts
    # Both containers meet in that folder.
    admin = containers_of(rendered)["admin"]
    assert mounts[config.runtime_dir] in {mount["name"] for mount in admin["volumeMounts"]}
    assert admin["args"][admin["args"].index("--expected-ranks") + 1] == "4"


def test_children_belong_to_their_resource() -> None:
    for manifest in objects_of(BIG):
        meta = manifest["metadata"]
        assert meta["namespace"] == "serving"
        (owner,) = meta["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("0a1b2c3d", True)
    assert all("ownerReferences" not in manifest["metadata"] for manifest in objects_of(SMALLEST))
