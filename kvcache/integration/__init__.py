# SPDX-License-Identifier: Apache-2.0
"""Where the cache meets the programs that serve models."""
