"""What the wire will allow: link curves, collective costs, the timeline of a step, scaling and advice. Never imports torch."""
