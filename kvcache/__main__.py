# SPDX-License-Identifier: Apache-2.0
"""`python -m kvcache`: the same as the program `kvcache`."""

from kvcache.cli import main

main()
