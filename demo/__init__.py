# SPDX-License-Identifier: Apache-2.0
"""`make demo`: one long prompt twice on a real vLLM, the second time from the cache."""
