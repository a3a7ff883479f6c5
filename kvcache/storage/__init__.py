# SPDX-License-Identifier: Apache-2.0
"""Where stored chunks live: tiers, the order between them, and what leaves when room is needed."""
