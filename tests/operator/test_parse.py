# SPDX-License-Identifier: Apache-2.0
"""Bad resources give one sentence a problem, which names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcache_operator.errors import ResourceError
from kvcache_operator.models import KVCacheSpec
from kvcache_operator.parse import field_paths, parse_file, parse_resource
from tests.operator.resources import SAMPLES, SMALLEST, with_value

BAD_VALUES: list[tuple[str, Any, str]] = [
    ("spec.replicas", -1, "-1 is too small; write 0 or more"),
    ("spec.replicas", 65, "65 is too large; write 64 or less"),
    ("spec.replicas", "2", "'2' is not a whole number; write one"),
    ("spec.replicas", True, "True is not a whole number; write one"),
    ("spec.model.name", "", "is empty; write at least one character"),
    ("spec.model.servedName", "x" * 129, "is too long; write at most 128 characters"),
    ("spec.engine.image", "vllm", "'vllm' has neither tag nor digest; write one, such as vllm:0.1.0"),
    ("spec.engine.image", "host:5000/vllm", "'host:5000/vllm' has neither tag nor digest"),
    ("spec.engine.device", "GPU", "'GPU' is not known; write CUDA or CPU"),
    ("spec.engine.args", "--seed=1", "'--seed=1' is not a list; write one"),
    ("spec.engine.startupTimeout", "30", "'30' is no duration; write hours, minutes and seconds such as 30m"),
    ("spec.engine.startupTimeout", "30s", "30s is less than 1m; write 1m or more"),
    ("spec.engine.startupTimeout", "7h", "7h is more than 6h; write 6h or less"),
    ("spec.engine.drainTimeout", 60, "60 is no duration"),
    ("spec.cache.chunkTokens", 200, "200 is no power of two; take 256"),
    ("spec.cache.role", "both", "'both' is not known; write Both, Producer or Consumer"),
    ("spec.cache.transfer", "Half", "'Half' is not known; write Whole or Layerwise"),
    ("spec.cache.tiers.cpu", "4Gi", "'4Gi' is not a mapping of keys to values; write one"),
    ("spec.cache.tiers.cpu.capacity", "4GB", "'4GB' is no quantity; write a number with a unit"),
    ("spec.cache.tiers.cpu.capacity", "4", "'4' has no unit; write 32Gi for gibibytes"),
    ("spec.model.name", "/models/../etc", "leads out of its folder; write the path without '..'"),
    ("spec.model.volume.claimName", "A/../b", "does not fit; write the name of an object"),
    ("metadata.namespace", "../x", "names no namespace"),
    ("spec.cache.tiers.cpu.capacity", 4, "'4' has no unit"),
    ("spec.cache.tiers.cpu.capacity", "255Mi", "255Mi is less than 256Mi; write 256Mi or more"),
    ("spec.admin.port", 80, "80 is too small; write 1024 or more"),
    ("metadata.name", "Qwen", "'Qwen' cannot name the resource's Service"),
    ("metadata.name", "q" * 46, "use at most 45 lower-case letters, digits and dashes"),
    ("kind", "KVcache", "'KVcache' is not known; write KVCache"),
]


@pytest.mark.parametrize(("path", "value", "sentence"), BAD_VALUES)
def test_a_bad_value_is_named_by_its_path(path: str, value: Any, sentence: str) -> None:
    with pytest.raises(ResourceError) as caught:
        parse_resource(with_value(SMALLEST, path, value))
    assert [problem.path for problem in caught.value.problems] == [path]
    assert str(caught.value).startswith(f"{path}: ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("spec.cache.chunkToken", "unknown key; did you mean chunkTokens?"),
        ("spec.cache.chunk_tokens", "unknown key; did you mean chunkTokens?"),
        ("spec.modle", "unknown key; did you mean model?"),
        # One level too high.
        ("spec.cache.capacity", "unknown key here; it belongs at spec.cache.tiers.cpu.capacity"),
        ("spec.tiers", "unknown key here; it belongs at spec.cache.tiers"),
        ("spec.rollout.zzz", "unknown key; the known ones here are maxSurge, maxUnavailable"),
    ],
)
def test_an_unknown_key_leads_to_the_known_one(path: str, sentence: str) -> None:
    with pytest.raises(ResourceError) as caught:
        parse_resource(with_value(SMALLEST, path, 1))
    assert str(caught.value) == f"{path}: {sentence}"


@pytest.mark.parametrize("value", [{"mode": "Enabled"}, {}, None])
def test_blending_is_refused_with_the_reason(value: Any) -> None:
    with pytest.raises(
        ResourceError, match=r"^spec\.cache\.blend: is not offered: vLLM's connector interface"
    ):
        parse_resource(with_value(SMALLEST, "spec.cache.blend", value))


@pytest.mark.parametrize(
    "arg",
    [
        "--model=x",
        "--port",
        "--kv-transfer-config",
        "--kv_transfer_config={}",
        "--kv-transfer-config.kv_role=kv_producer",
        "--kv-transfer",
        "--max-model",
        "--tensor_parallel_size=2",
        "-tp=2",
        "-tp",
        "--config",
    ],
)
def test_flags_that_the_operator_owns_are_refused_in_every_spelling(arg: str) -> None:
    with pytest.raises(ResourceError, match=r"^spec\.engine\.args\[1\]: .* which the operator sets itself"):
        parse_resource(with_value(SMALLEST, "spec.engine.args", ["--seed=1", arg]))


@pytest.mark.parametrize(
    "arg", ["--model-impl=vllm", "--block-size=32", "--enable-prefix-caching", "8", "-O0"]
)
def test_other_flags_pass(arg: str) -> None:
    document = with_value(SMALLEST, "spec.engine.args", [arg])
    assert parse_resource(document).spec.engine.args == (arg,)


@pytest.mark.parametrize(
    ("env", "path", "sentence"),
    [
        ([{"name": "A"}, {"name": "A"}], "spec.engine.env", "A is given twice; keep one"),
        ([{"name": "LMCACHE_CHUNK_SIZE", "value": "1"}], "spec.engine.env[0].name", "is set by the operator"),
        (
            [{"name": "PYTHONHASHSEED", "value": "random"}],
            "spec.engine.env[0].name",
            "is set by the operator",
        ),
        ([{"name": "A=B"}], "spec.engine.env[0].name", "is no name of an environment variable"),
        (
            [{"name": "A", "value": "b", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "spec.engine.env[0]",
            "A has both value and valueFrom; keep one",
        ),
    ],
)
def test_environment_variables_are_checked(env: list[Any], path: str, sentence: str) -> None:
    with pytest.raises(ResourceError) as caught:
        parse_resource(with_value(SMALLEST, "spec.engine.env", env))
    assert str(caught.value).startswith(f"{path}: ")
    assert sentence in str(caught.value)


def test_every_problem_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "apiVersion: kvcache.dev/v1alpha1\n"
        "kind: KVCache\n"
        "metadata: {name: qwen}\n"
        "spec:\n"
        "  model: {}\n"
        "  cache:\n"
        "    chunkTokens: 100\n"
        "    tiers:\n"
        "      cpu: {capacity: 4GB}\n"
    )
    with pytest.raises(ResourceError) as caught:
        parse_file(file)
    assert [(problem.path, problem.line) for problem in caught.value.problems] == [
        ("spec.model.name", 5),
        ("spec.cache.chunkTokens", 7),
        ("spec.cache.tiers.cpu.capacity", 9),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "correct the YAML"),
        ("? [a]\n: 1\n", "correct the YAML"),
        ("a: 2020-13-45\n", "correct the YAML"),
        ("spec: &s {cache: *s}\n", "correct the YAML"),
        ("[" * 3000, "correct the YAML"),
        ("kind: KVCache\nkind: KVCache\n", "line 2: 'kind' is given twice"),
        ("- a\n", "holds 0 resources of kind KVCache; write exactly one"),
        ("", "holds 0 resources of kind KVCache; write exactly one"),
        (yaml.safe_dump_all([SMALLEST, SMALLEST]), "holds 2 resources of kind KVCache; write exactly one"),
    ],
)
def test_a_file_that_holds_no_single_resource(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    with pytest.raises(ResourceError) as caught:
        parse_file(file)
    assert str(file) in str(caught.value)
    assert sentence in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"nothing\.yaml cannot be read"):
        parse_file(tmp_path / "nothing.yaml")


def test_other_kinds_may_stand_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(yaml.safe_dump_all([{"kind": "Namespace", "metadata": {"name": "x"}}, SMALLEST]))
    assert parse_file(file).metadata.name == "qwen"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_samples_are_valid(sample: Path) -> None:
    assert parse_file(sample).spec.cache.tiers.cpu.capacity > 0


def test_what_the_api_server_adds_is_no_error() -> None:
    document = with_value(SMALLEST, "status", {"replicas": 1})
    document = with_value(document, "metadata.managedFields", [{"manager": "kubectl"}])
    document = with_value(document, "metadata.uid", "1-2-3")
    assert parse_resource(document).metadata.uid == "1-2-3"


def test_equal_sizes_are_equal_however_they_are_written() -> None:
    sizes = ["4Gi", "4096Mi", "4294967296", 4294967296]
    parsed = [parse_resource(with_value(SMALLEST, "spec.cache.tiers.cpu.capacity", size)) for size in sizes]
    assert {resource.spec.cache.tiers.cpu.capacity for resource in parsed} == {4 << 30}


def test_field_paths_name_every_leaf_once() -> None:
    paths = list(field_paths(KVCacheSpec))
    assert len(paths) == len(set(paths))
    assert {"replicas", "engine.env.valueFrom.secretKeyRef.key", "cache.tiers.cpu.capacity"} <= set(paths)
