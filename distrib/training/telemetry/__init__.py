"""Telemetry: status messages, step times, TCP statistics."""
