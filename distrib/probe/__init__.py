"""What the wire does: every link of the cluster measured, and what is wrong with it said."""
