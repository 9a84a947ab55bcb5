"""The process around each rank, on every host: `python -m distrib_launch.rank_agent`. Standard library only, so that it starts in milliseconds."""
