"""Data loading: sharded loaders, samplers, epochs, load balancing."""
