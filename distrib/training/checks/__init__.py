"""Checks for silently wrong training."""
