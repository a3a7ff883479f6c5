# SPDX-License-Identifier: Apache-2.0
"""The tiers, one module each."""
