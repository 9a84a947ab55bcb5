"""Probe: measures all links of a cluster, and diagnoses what is slow."""
