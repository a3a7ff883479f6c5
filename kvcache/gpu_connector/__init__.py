# SPDX-License-Identifier: Apache-2.0
"""GPU connectors: they copy KV between an engine's pages and memory objects."""
