"""Gradient averaging on CPU hosts and gradient compression, as DDP communication hooks."""
