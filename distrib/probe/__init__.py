"""Probe: measures all links of a cluster and diagnoses slow hosts and links."""
