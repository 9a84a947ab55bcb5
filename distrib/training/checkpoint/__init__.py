"""Checkpoints: file format, replicas, synchronization of restored state."""
