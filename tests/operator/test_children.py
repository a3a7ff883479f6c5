# SPDX-License-Identifier: Apache-2.0
"""Single properties of what is rendered, most of them complaints of users of other operators."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kvcache.config import load_config
from kvcache_operator.errors import ResourceError
from kvcache_operator.models import KVCacheSpec
from kvcache_operator.models.measures import Quantity
from kvcache_operator.parse import parse_resource
from kvcache_operator.plan import make_plan
from kvcache_operator.render import Kinds, Manifest, render
from kvcache_operator.render.overlay import overlaid
from kvcache_operator.settings import Settings
from tests.operator.full import BIG, SHARED, STATEFUL
from tests.operator.resources import SMALLEST, containers_of, plan_of, pod_of, rendered_of, with_value

DISK = "spec.cache.tiers.disk"


def child(document: dict[str, Any], kind: str, settings: Settings | None = None) -> Manifest | None:
    rendered = render(make_plan(parse_resource(document), settings or Settings()), Kinds(pod_monitor=True))
    return next((entry for entry in rendered.all if entry["kind"] == kind), None)


def config_of(document: dict[str, Any], tmp_path: Any) -> Any:
    """The configuration as the engine reads it."""
    file = tmp_path / "config.yaml"
    file.write_text(rendered_of(document).config_map["data"]["config.yaml"])
    return load_config({"config_file": str(file)}, environ={})


@pytest.mark.parametrize("document", [BIG, STATEFUL, SHARED], ids=lambda entry: entry["metadata"]["name"])
def test_the_engine_reads_what_the_operator_writes(document: dict[str, Any], tmp_path: Any) -> None:
    assert config_of(document, tmp_path) == plan_of(document).config.model_copy(
        update={"hash_seed": ""}  # a Secret holds it here
    )


def test_sizes_written_in_any_way_are_the_same_bytes(tmp_path: Any) -> None:
    sizes = [
        config_of(with_value(SMALLEST, "spec.cache.tiers.cpu.capacity", size), tmp_path).tiers.cpu.capacity
        for size in ("4Gi", "4096Mi", "4294967296", 4294967296)
    ]
    assert set(sizes) == {4 << 30}


def test_shared_memory_has_a_size_that_can_be_chosen() -> None:
    def shm(document: dict[str, Any]) -> dict[str, Any]:
        volumes = {volume["name"]: volume for volume in pod_of(rendered_of(document))["volumes"]}
        found: dict[str, Any] = volumes["dshm"]["emptyDir"]
        return found

    two = with_value(SMALLEST, "spec.engine.tensorParallelSize", 2)
    assert shm(two)["medium"] == "Memory"
    assert int(Quantity.parse(shm(two)["sizeLimit"])) > 2 * (64 << 20)
    assert shm(with_value(two, "spec.engine.shmSize", "1Gi"))["sizeLimit"] == "1024Mi"


def test_a_disk_in_the_pod_is_asked_for_and_bounded() -> None:
    rendered = rendered_of(with_value(SMALLEST, DISK, {"capacity": "50Gi"}))
    resources = containers_of(rendered)["vllm"]["resources"]
    volume = next(entry for entry in pod_of(rendered)["volumes"] if entry["name"] == "disk")
    limit = Quantity.parse(volume["emptyDir"]["sizeLimit"])
    assert limit > 50 << 30
    for kind in ("requests", "limits"):
        assert Quantity.parse(resources[kind]["ephemeral-storage"]) > limit
    # Downloads go to the same disk: the limit leaves room for them, or for as much as was said.
    bounded = with_value(SMALLEST, "spec.model.volume", {"sizeLimit": "20Gi"})
    bounded = with_value(bounded, DISK, {"capacity": "50Gi"})
    smaller = containers_of(rendered_of(bounded))["vllm"]["resources"]["limits"]["ephemeral-storage"]
    assert Quantity.parse(smaller) < Quantity.parse(resources["limits"]["ephemeral-storage"])


def test_a_disk_of_several_ranks_is_one(tmp_path: Any) -> None:
    document = with_value(
        with_value(SMALLEST, DISK, {"capacity": "50Gi"}), "spec.engine.tensorParallelSize", 4
    )
    assert config_of(document, tmp_path).tiers.disk.capacity == 50 << 30


def test_memory_limits_must_hold_the_tiers() -> None:
    with pytest.raises(ResourceError, match="need; write that much") as caught:
        plan_of(with_value(SMALLEST, "spec.resources.limits.memory", "33Gi"))
    assert caught.value.reason == "MemoryBudgetExceeded"
    assert caught.value.problems[0].path == "spec.resources.limits.memory"
    plan = plan_of(with_value(SMALLEST, "spec.resources.limits.memory", "60Gi"))
    assert plan.budget.engine_limit == 60 << 30


def test_each_claim_must_hold_the_tier() -> None:
    disk = {"capacity": "50Gi", "volume": {"claimTemplate": {"size": "50Gi"}}}
    with pytest.raises(ResourceError, match=r"volume\.claimTemplate\.size: 50Gi are too small"):
        plan_of(with_value(SMALLEST, DISK, disk))


@pytest.mark.parametrize(
    "path", ["/", "/tmp/x", "/etc/kvcache", "/models/kv", "/run", "/var/run/secrets", "a/../b"]
)
def test_the_disks_path_collides_with_nothing(path: str) -> None:
    with pytest.raises(ResourceError, match="path"):
        plan_of(with_value(SMALLEST, DISK, {"capacity": "1Gi", "path": path}))


def test_secrets_are_files_that_the_configuration_names(tmp_path: Any) -> None:
    rendered = rendered_of(BIG)
    engine, pod = containers_of(rendered)["vllm"], pod_of(rendered)
    config = config_of(BIG, tmp_path)
    mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    valkey = config.tiers.remote.valkey
    for path, secret in (
        (valkey.password_file, "valkey"),
        (valkey.tls.ca_file, "valkey-ca"),
        (valkey.tls.cert_file, "valkey-client"),
        (valkey.tls.key_file, "valkey-client"),
        (config.tiers.encryption_key_file, "keys"),
    ):
        folder, _, name = path.rpartition("/")
        volume = volumes[next(use for use, mount in mounts.items() if mount == folder)]["secret"]
        assert volume["secretName"] == secret
        assert name in {item["path"] for item in volume["items"]}
    # And none of them is anywhere in a ConfigMap or a variable.
    assert "valueFrom" in next(entry for entry in engine["env"] if entry["name"] == "KVCACHE_SEED")
    admin = containers_of(rendered)["admin"]
    assert {mount["name"] for mount in admin["volumeMounts"]} <= {
        "runtime",
        "admin-token",
        "home",
        "tmp",
        "config",
    }


def test_an_open_port_of_events_is_in_policy_service_and_flag() -> None:
    document = with_value(SMALLEST, "spec.cache.events.mode", "ZMQ")
    policy, engine = child(document, "NetworkPolicy"), containers_of(rendered_of(document))["vllm"]
    assert policy is not None
    assert {"port": "events", "protocol": "TCP"} in policy["spec"]["ingress"][0]["ports"]
    assert any(port["name"] == "events" for port in engine["ports"])
    assert any('"publisher":"zmq"' in arg for arg in engine["args"])
    closed = child(SMALLEST, "NetworkPolicy")
    assert closed is not None
    assert "events" not in str(closed)


def test_admin_and_metrics_are_for_the_operator_and_prometheus() -> None:
    settings = Settings(namespace="kvcache-system", monitoring_namespace="monitoring")
    policy = child(SMALLEST, "NetworkPolicy", settings)
    assert policy is not None
    users, management = policy["spec"]["ingress"]
    assert {entry["port"] for entry in users["ports"]} == {"http"}
    assert {entry["port"] for entry in management["ports"]} == {"admin", "http"}
    names = [entry["namespaceSelector"]["matchLabels"] for entry in management["from"]]
    assert names == [
        {"kubernetes.io/metadata.name": "kvcache-system"},
        {"kubernetes.io/metadata.name": "monitoring"},
    ]


def test_a_monitor_selects_pods_and_ports_that_are_there() -> None:
    rendered = render(plan_of(SMALLEST), Kinds(pod_monitor=True, service_monitor=True))
    (monitor,) = (entry for entry in rendered.others if entry["kind"].endswith("Monitor"))
    assert monitor["kind"] == "PodMonitor"
    labels = rendered.workload["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {
        port["name"]
        for container in rendered.workload["spec"]["template"]["spec"]["containers"]
        for port in container["ports"]
    }
    assert {entry["port"] for entry in monitor["spec"]["podMetricsEndpoints"]} <= ports

    rendered = render(plan_of(SMALLEST), Kinds(service_monitor=True))
    (monitor,) = (entry for entry in rendered.others if entry["kind"] == "ServiceMonitor")
    services = [entry for entry in rendered.applied if entry["kind"] == "Service"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    # Exactly one, or everything would be counted twice.
    (selected,) = (entry for entry in services if wanted <= entry["metadata"]["labels"].items())
    assert {entry["port"] for entry in monitor["spec"]["endpoints"]} <= {
        port["name"] for port in selected["spec"]["ports"]
    }
    assert not [entry for entry in render(plan_of(SMALLEST)).others if entry["kind"].endswith("Monitor")]


def test_every_pod_of_a_resource_has_its_pull_secrets() -> None:
    assert pod_of(rendered_of(BIG))["imagePullSecrets"] == [{"name": "registry"}]


def test_an_overlay_adds_and_keeps() -> None:
    spec = {
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "volumes": [{"name": "extra", "emptyDir": {}}],
        "containers": [
            {
                "name": "vllm",
                "env": [{"name": "MORE", "value": "1"}, {"name": "VLLM_NO_USAGE_STATS", "value": "0"}],
                "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
                "resources": {"limits": {"example.org/rdma": "1"}},
            }
        ],
    }
    document = with_value(
        SMALLEST, "spec.podTemplate", {"metadata": {"annotations": {"a": "b"}}, "spec": spec}
    )
    before, after = rendered_of(SMALLEST), rendered_of(document)
    old, new = containers_of(before)["vllm"], containers_of(after)["vllm"]
    assert pod_of(after)["tolerations"] == spec["tolerations"]
    assert [v["name"] for v in pod_of(after)["volumes"]] == [v["name"] for v in pod_of(before)["volumes"]] + [
        "extra"
    ]
    assert new["args"] == old["args"]
    assert new["securityContext"] == old["securityContext"]
    assert {"name": "VLLM_NO_USAGE_STATS", "value": "0"} in new["env"]
    names = [entry["name"] for entry in new["env"]]
    assert len(names) == len(set(names)) == len(old["env"]) + 1
    assert new["resources"]["limits"] == old["resources"]["limits"] | {"example.org/rdma": "1"}
    assert after.workload["spec"]["template"]["metadata"]["annotations"]["a"] == "b"
    assert set(containers_of(after)) == {"vllm", "admin"}


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"containers": [{"name": "vllm", "command": ["sh"]}]},
            "command of this container is the operator's",
        ),
        ({"containers": [{"name": "admin", "args": []}]}, "args of this container is the operator's"),
        ({"containers": [{"name": "vllm", "env": [{"name": "PYTHONHASHSEED"}]}]}, "is set by the operator"),
        ({"containers": {"name": "x"}}, "is no list of mappings that each have a name"),
        ({"containers": [{"image": "x"}]}, "is no list of mappings that each have a name"),
        ({"volumes": [{"name": "a"}, {"name": "a"}]}, "a is given twice"),
        ({"nodeName": "x" * 70_000}, "bytes are too many"),
        ({"terminationGracePeriodSeconds": 30}, "end before the requests .* write 75 or more"),
        (
            {"containers": [{"name": "x", "env": [{"name": "A"}, {"name": "B"}, {"name": "A"}]}]},
            "A is given twice",
        ),
        (
            {"initContainers": [{"name": "x", "env": [{"name": "A"}, {"name": "A"}]}]},
            "A is given twice",
        ),
    ],
)
def test_overlays_that_cannot_be(spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ResourceError, match=sentence) as caught:
        plan_of(with_value(SMALLEST, "spec.podTemplate.spec", spec))
    assert caught.value.problems[0].path.startswith("spec.podTemplate.spec")


def test_what_is_allowed_and_unwise_is_said() -> None:
    loose = {
        "hostIPC": True,
        "containers": [{"name": "x", "image": "y:1", "securityContext": {"privileged": True}}],
    }
    document = with_value(
        with_value(SMALLEST, "spec.podTemplate.spec", loose), "spec.engine.image", "v:latest"
    )
    text = " ".join(plan_of(document).warnings)
    for part in ("latest", "hostIPC", "container x"):
        assert part in text
    assert plan_of(SMALLEST).warnings == ()


def test_merging_leaves_its_arguments_alone() -> None:
    base = {"volumes": [{"name": "a", "emptyDir": {}}], "x": {"y": 1}}
    merged = overlaid(base, {"volumes": [{"name": "a", "secret": {"secretName": "s"}}], "x": {"z": 2}})
    assert merged == {"volumes": [{"name": "a", "secret": {"secretName": "s"}}], "x": {"y": 1, "z": 2}}
    assert base == {"volumes": [{"name": "a", "emptyDir": {}}], "x": {"y": 1}}


def test_live_settings_replace_no_pod() -> None:
    def template(document: dict[str, Any]) -> Any:
        return rendered_of(document).workload["spec"]["template"]

    document = with_value(SMALLEST, DISK, {"capacity": "1Gi"})
    assert template(document) == template(with_value(document, "spec.cache.tiers.cpu.eviction", "LFU"))
    assert template(document) == template(with_value(document, f"{DISK}.write", "Back"))
    assert template(document) != template(with_value(document, "spec.cache.chunkTokens", 128))
    assert template(document) != template(with_value(document, "spec.cache.namespace", "blue"))


def test_another_namespace_or_seed_is_in_every_key(tmp_path: Any) -> None:
    assert config_of(with_value(SMALLEST, "spec.cache.namespace", "blue"), tmp_path).hash_seed == "blue"
    env = {entry["name"]: entry for entry in containers_of(rendered_of(BIG))["vllm"]["env"]}
    assert env["KVCACHE_SEED"]["valueFrom"] == {"secretKeyRef": {"name": "seeds", "key": "blue"}}
    assert env["LMCACHE_HASH_SEED"]["value"] == "$(KVCACHE_SEED)/blue"
    # The file would win over the variable.
    assert "hash_seed" not in yaml.safe_load(rendered_of(BIG).config_map["data"]["config.yaml"])


def test_tenants_share_their_quota_among_ranks(tmp_path: Any) -> None:
    document = with_value(SMALLEST, "spec.cache.tiers.tenants", [{"salt": "a", "quota": "8Gi"}])
    document = with_value(document, "spec.engine.tensorParallelSize", 4)
    assert config_of(document, tmp_path).tiers.tenants["a"].quota == 2 << 30


@pytest.mark.parametrize(
    ("experimental", "sentence"),
    [
        ({"chunk_size": "128"}, "has fields of its own"),
        ({"min_retrieve": "1"}, "unknown key"),
        ({"min_retrieve_tokens": "many"}, "min_retrieve_tokens"),
    ],
)
def test_experimental_keys_are_checked(experimental: dict[str, str], sentence: str) -> None:
    with pytest.raises(ResourceError, match=sentence) as caught:
        plan_of(with_value(SMALLEST, "spec.experimental", experimental))
    assert caught.value.problems[0].path.startswith("spec.experimental")


def test_claims_outlive_the_workload_and_their_pods_are_found() -> None:
    rendered = rendered_of(STATEFUL)
    spec = rendered.workload["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    assert spec["serviceName"] == "stateful-pods"
    assert claim["metadata"]["labels"] == spec["selector"]["matchLabels"]
    assert "ownerReferences" not in claim["metadata"]
    assert any(mount["name"] == "disk" for mount in containers_of(rendered)["vllm"]["volumeMounts"])


def test_suspended_resources_keep_all_but_their_pods() -> None:
    awake, asleep = rendered_of(STATEFUL), rendered_of(with_value(STATEFUL, "spec.suspend", True))
    assert asleep.workload["spec"]["replicas"] == 0
    assert asleep.workload["spec"]["volumeClaimTemplates"] == awake.workload["spec"]["volumeClaimTemplates"]
    assert [entry["kind"] for entry in awake.applied] == [entry["kind"] for entry in asleep.applied]


def test_whoever_runs_a_vllm_of_their_own_finds_all_of_it() -> None:
    data = next(
        entry["data"] for entry in rendered_of(BIG).applied if entry["metadata"]["name"] == "big-connection"
    )
    engine = containers_of(rendered_of(BIG))["vllm"]
    flags = dict(zip(engine["args"], engine["args"][1:], strict=False))
    assert data["kv-transfer-config.json"] == flags["--kv-transfer-config"]
    assert data["config.yaml"] == rendered_of(BIG).config_map["data"]["config.yaml"]
    assert "hub" in data["secrets.json"]


def test_no_field_is_a_float() -> None:
    """Floats do not survive the ways of Kubernetes' clients."""
    assert "'type': 'number'" not in str(KVCacheSpec.model_json_schema())
