"""Findings: what the measurements say about hosts, NICs and links."""
