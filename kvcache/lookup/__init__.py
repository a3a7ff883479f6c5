# SPDX-License-Identifier: Apache-2.0
"""How the scheduler asks every rank which chunks of a prompt it holds, and takes leases on them."""
