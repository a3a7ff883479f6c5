# SPDX-License-Identifier: Apache-2.0
"""From tokens to keys: the chained hash of a prefix and everything that must be equal for two KVs to be
interchangeable."""
