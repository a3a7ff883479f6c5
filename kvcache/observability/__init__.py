# SPDX-License-Identifier: Apache-2.0
"""The cache's metrics."""
