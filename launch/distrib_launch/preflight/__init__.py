"""Preflight: inventories and checks of the hosts, choice of the network, and test connections, before the job starts."""
