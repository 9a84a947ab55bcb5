"""Command lines of `distrib-launch` and `distrib-topo`: their options and printed output."""
