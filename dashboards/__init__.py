"""Dashboards for Grafana and rules for Prometheus. `python -m dashboards.build` writes what is generated."""
