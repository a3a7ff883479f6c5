# SPDX-License-Identifier: Apache-2.0
"""The operator of KVCache resources: parse -> plan -> render -> apply -> observe -> summarise.

Only `apply`, `observe` and `local` do I/O. Nothing here imports torch, vLLM or the engine; of `kvcache` only
the configuration model is shared, since the operator renders exactly that model.
"""

GROUP = "kvcache.dev"
VERSION = "v1alpha1"
KIND = "KVCache"
PLURAL = "kvcaches"
API_VERSION = f"{GROUP}/{VERSION}"
FIELD_MANAGER = "kvcache-operator"
