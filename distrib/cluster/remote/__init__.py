"""Programs that run on other hosts with the standard library only."""
