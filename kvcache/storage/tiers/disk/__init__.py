# SPDX-License-Identifier: Apache-2.0
"""The tier in files: one object a file, in one or more directories that processes share.

`names` says what is where, `ledger` how much, `folder` and `directory` hold files and failures, `catalog`
is the index, `store` keeps both equal, `reader` and `writer` do the work, `engine` and `transfers` the I/O.
"""

from kvcache.storage.tiers.disk.tier import DiskTier, open_disk

__all__ = ["DiskTier", "open_disk"]
