"""Supervision of a running job: connections, health, hangs, performance, failures, restarts and the final report."""
