"""Benchmarks of links: TCP, MPI, all-reduce, inside a node."""
