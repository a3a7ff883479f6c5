# SPDX-License-Identifier: Apache-2.0
"""A KV cache for vLLM: keeps the keys and values of text that was seen before and gives them back.

The package imports nothing heavy by itself, so that the operator and the admin sidecar can share its
configuration model without torch or vLLM.
"""

__version__ = "0.1.0"
