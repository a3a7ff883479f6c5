# SPDX-License-Identifier: Apache-2.0
"""The admin sidecar: statistics, metrics, readiness and flushes of one vLLM, over HTTP."""
