# SPDX-License-Identifier: Apache-2.0
"""Host memory of the cache: the region, chunks carved from it, their formats, and leases on them."""
