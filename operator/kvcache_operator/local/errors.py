# SPDX-License-Identifier: Apache-2.0
"""Why a local run cannot go on."""


class LocalError(RuntimeError):
    """One sentence for the user: what was read, what is wrong, what to do."""
