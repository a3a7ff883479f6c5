# SPDX-License-Identifier: Apache-2.0
"""Writes the pages that follow from the code: `python docs/generate.py`; `--check` only says what is out of
date.

metrics.md from the metrics' definitions and the alerts, configuration.md from the configuration's models and
their docstrings, openapi.json from the admin's routes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvcache.admin import openapi
from kvcache.config import LMCacheEngineConfig
from kvcache.config.live import is_live
from kvcache.observability.definitions import DEFINITIONS, LABELS, Definition

FOLDER = Path(__file__).resolve().parent
RULES = FOLDER.parent / "dashboards" / "rules"
_MADE = "<!-- Made by docs/generate.py: change what it is made from. -->"

_SECTIONS = {
    "Processes": ("build_info", "process_up", "process_ready", "failures"),
    "Requests": (
        *("requests", "prompt_tokens", "time_to_first_token_seconds", "prefill_tokens", "prefill_seconds"),
        *("lookups", "lookup_seconds", "lookup_timeouts"),
        *("lookup_waits", "lookup_wait_seconds", "lookup_waits_expired"),
    ),
    "Ranks": (
        *("rank_info", "way_info", "way_bytes_per_second", "link_bytes_per_second"),
        *("stored_tokens", "loaded_tokens", "load_failed_tokens"),
    ),
}
_METRICS_INTRODUCTION = f"""{_MADE}
# Metrics

The admin sidecar exports the metrics of all processes of its pod at `/metrics`, on its port (8081), without a
token. It asks the processes once a second; a scrape reads what they answered last and reaches none of them.

A rank counts the tokens whose part it holds, so with several ranks every token is counted once by each; the
scheduler counts each token once. Counters begin at zero with their process.

The outcomes of `kvcache_prompt_tokens_total` add up to the prompt tokens of all requests. The hit rate is
what this cache gave back of what vLLM's own prefix cache did not have:

```promql
sum(rate(kvcache_prompt_tokens_total{{outcome="hit_cache"}}[5m]))
  / sum(rate(kvcache_prompt_tokens_total{{outcome!="hit_gpu"}}[5m]))
```

Dashboards and rules choose pods by the labels `namespace`, `resource` and `pod` of the scraped target. The
PodMonitor that the operator makes sets them; for a Prometheus without its operator there is
[dashboards/prometheus.yaml](../dashboards/prometheus.yaml). What the dashboards show:
[dashboards.md](dashboards.md).

vLLM's own `/metrics` (port 8000) has what vLLM counts, and the most important figures of the cache under
`vllm:kvcache_*`.
"""


def metrics_page() -> str:
    """metrics.md."""
    by_key = {definition.key: definition for definition in DEFINITIONS}
    sections = {title: [by_key.pop(key) for key in keys] for title, keys in _SECTIONS.items()}
    sections["Tiers"] = [by_key.pop(key) for key in list(by_key) if key.startswith("tier_")]
    sections["The admin sidecar"] = list(by_key.values())
    parts = [_METRICS_INTRODUCTION]
    for title, definitions in sections.items():
        rows = ((f"`{d.name}`", d.kind, d.unit, _labels(d), d.help) for d in definitions)
        parts.append(f"## {title}\n\n{_table(('metric', 'kind', 'unit', 'labels', 'meaning'), rows)}")
    labels = ((f"`{name}`", text) for name, text in sorted(LABELS.items()))
    parts.append(f"## Labels\n\n{_table(('label', 'values'), labels)}")
    parts.append(f"## Alerts\n\n{_alerts()}")
    return "\n".join(parts)


def _labels(definition: Definition) -> str:
    return ", ".join(f"`{label}`" for label in definition.labels)


def _alerts() -> str:
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    rows = (
        (
            f"`{rule['alert']}`",
            rule["labels"]["severity"],
            rule["for"],
            rule["annotations"]["description"],
            f"[what to do]({rule['annotations']['runbook'].removeprefix('docs/')})",
        )
        for group in groups
        for rule in group["rules"]
    )
    text = (
        "In [dashboards/rules](../dashboards/rules), with tests that `promtool test rules` runs. None of"
        " them means wrong answers: whatever fails in the cache becomes a miss.\n\n"
    )
    return text + _table(("alert", "severity", "after", "meaning", ""), rows)


_CONFIGURATION_INTRODUCTION = f"""{_MADE}
# Configuration of the engine

What the connector and the engine can be told. In a cluster nobody writes this: the operator makes it of the
resource ([resource.md](resource.md)) and mounts it into both containers. Elsewhere it comes from three
sources, of which the first one that names a key wins:

1. `kv_connector_extra_config` of vLLM's `--kv-transfer-config`,
2. the YAML file that its key `config_file` or the variable `LMCACHE_CONFIG_FILE` names,
3. variables: `LMCACHE_CHUNK_SIZE`, nested keys joined by two underscores (`LMCACHE_TIERS__CPU__CAPACITY`).

An unknown key is an error that names the nearest known one. Sizes are written with a unit: `32Gi`, `500M`.

**Live** fields take effect in running processes: the admin sidecar watches the mounted file, checks it, and
hands it to the scheduler and the ranks. All others wait for the next start of the processes; `GET /v1/config`
of the admin names the fields that do. A file that cannot be used is refused, the last good one stays in
effect, and `/v1/config` says why. A live field waits all the same where a process cannot do it: more of
`tiers.cpu.capacity` than was set aside at the start, and what a tier does not change while it runs.
"""


def configuration_page() -> str:
    """configuration.md."""
    header = ("field", "type", "default", "live", "meaning")
    rows = list(_fields(LMCacheEngineConfig, ""))
    return f"{_CONFIGURATION_INTRODUCTION}\n{_table(header, rows)}"


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, ...]]:
    docs = _docstrings(model)
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        below = [part for part in _parts(field.annotation) if _is_model(part)]
        listed = get_origin(field.annotation) in (list, dict)
        if below and not listed:
            text = docs.get(name) or inspect.getdoc(below[0]) or ""
            optional = type(None) in get_args(field.annotation)
            if prefix or optional:
                yield f"`{path}`", "mapping", "" if not optional else "none", "", _line(text)
            yield from _fields(below[0], f"{path}.")
            continue
        # What lies in a list or a table is compared with it as one.
        live = "yes" if is_live(path.replace("[]", ".*").partition(".*")[0]) else ""
        yield f"`{path}`", _type(field), _default(field), live, _line(docs.get(name, ""))
        if below:
            inner = "[]" if get_origin(field.annotation) is list else ".*"
            yield from _fields(below[0], f"{path}{inner}.")


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The texts that stand below a model's fields, or else below the names of their types."""
    tree = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(tree, ast.ClassDef)  # noqa: S101
    module = sys.modules[model.__module__]
    of_types = _texts_below(ast.parse(inspect.getsource(module)).body)
    types = {
        ast.unparse(field.target): ast.unparse(field.annotation).removesuffix(" | None")
        for field in tree.body
        if isinstance(field, ast.AnnAssign)
    }
    found = {name: of_types[kind] for name, kind in types.items() if kind in of_types}
    return found | _texts_below(tree.body)


def _texts_below(body: list[ast.stmt]) -> dict[str, str]:
    found = {}
    for field, text in itertools.pairwise(body):
        if not isinstance(text, ast.Expr) or not isinstance(text.value, ast.Constant):
            continue
        if isinstance(field, ast.AnnAssign):
            found[ast.unparse(field.target)] = str(text.value.value)
        elif isinstance(field, ast.Assign):
            found[ast.unparse(field.targets[0])] = str(text.value.value)
    return found


def _parts(annotation: Any) -> list[Any]:
    return [annotation, *(inner for part in get_args(annotation) for inner in _parts(part))]


def _is_model(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, BaseModel)


def _type(field: FieldInfo) -> str:
    parts = _parts(field.annotation)
    origin = get_origin(field.annotation)
    if origin is dict or (origin is list and any(map(_is_model, parts))):
        return "mapping" if origin is dict else "list"
    literals = [str(part) for part in parts if isinstance(part, str)]
    if literals:
        return " \\| ".join(f"`{literal}`" for literal in literals)
    if any("parse_quantity" in str(entry) for entry in (*field.metadata, *parts)):
        return "size"
    names = {int: "number", float: "number", bool: "`true` \\| `false`", str: "text"}
    name = next((names[part] for part in parts if isinstance(part, type) and part in names), "mapping")
    return f"list of {name}s" if origin is list and name != "mapping" else name


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**needed**"
    value = field.get_default(call_default_factory=True)
    if value in (None, "", [], {}):
        return "none"
    if _type(field) == "size" and isinstance(value, int):
        for unit in ("Gi", "Mi", "Ki"):
            size = 1 << {"Gi": 30, "Mi": 20, "Ki": 10}[unit]
            if value % size == 0 and value:
                return f"`{value // size}{unit}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _line(text: str) -> str:
    return " ".join(text.split())


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(header)
    lines = [" | ".join(names), " | ".join("---" for _ in names), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


PAGES = {
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
    "openapi.json": openapi.text,
}


def outdated(folder: Path = FOLDER) -> list[str]:
    """Names of pages that are missing or differ from what would be written."""
    paths = {name: folder / name for name in PAGES}
    return [
        name
        for name, page in PAGES.items()
        if not paths[name].exists() or paths[name].read_text(encoding="utf-8") != page()
    ]


def main() -> int:
    """Returns 1 if `--check` finds a page that is out of date."""
    parser = argparse.ArgumentParser(prog="docs/generate.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    if parser.parse_args().check:
        names = outdated()
        if names:
            print(
                f"error: docs/{', docs/'.join(names)} is out of date; run python docs/generate.py",
                file=sys.stderr,
            )
        return 1 if names else 0
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
