"""Bandwidth model: link curves, collective costs, step timeline, scaling and recommendations. Never imports torch."""
