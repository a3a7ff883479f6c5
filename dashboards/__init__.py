# SPDX-License-Identifier: Apache-2.0
"""Grafana dashboards and Prometheus rules of the appliance, made from what its metrics are."""
