# SPDX-License-Identifier: Apache-2.0
"""The parts of a plan (`kvcache_operator.plan`): places and names, budgets, checks, the engine's
configuration.
"""
