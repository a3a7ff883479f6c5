# SPDX-License-Identifier: Apache-2.0
"""Kubernetes objects as YAML for people: no anchors, long texts as blocks, keys in the order given."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(*objects: dict[str, Any]) -> str:
    """The objects as documents of one YAML text."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
