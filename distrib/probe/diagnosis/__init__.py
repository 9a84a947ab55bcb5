"""Diagnosis of a probe's measurements: a table of checks, each of which reports findings about hosts, NICs or links."""
