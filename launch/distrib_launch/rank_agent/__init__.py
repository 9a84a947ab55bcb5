"""Rank agent, the process around each rank: `python -m distrib_launch.rank_agent`. Standard library only, so that it starts fast."""
