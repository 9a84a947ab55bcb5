"""`distrib-topo probe`: the job that measures, its journal, and what is shown and written of it."""
