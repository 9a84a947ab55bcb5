"""Cluster description: hosts, topology, links and the inventory of a host."""
