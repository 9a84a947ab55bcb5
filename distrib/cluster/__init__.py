"""What the cluster is: its hosts, its topology, what one host holds."""
