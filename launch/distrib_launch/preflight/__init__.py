"""Before anything starts: hosts are asked what they are, and judged; their network is chosen, and tried."""
