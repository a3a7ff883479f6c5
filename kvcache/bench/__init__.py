# SPDX-License-Identifier: Apache-2.0
"""Measurements of the data plane: `python -m kvcache.bench transfer|hash|alloc`."""
