# SPDX-License-Identifier: Apache-2.0
"""How the admin sidecar asks the scheduler and the ranks for their statistics and orders flushes."""
