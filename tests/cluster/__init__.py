# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes API for tests, as processes of this machine: see README.md."""
