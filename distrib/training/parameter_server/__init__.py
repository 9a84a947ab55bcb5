"""The asynchronous parameter server: workers push gradients, servers hold the parameters (docs/parameter_server.md)."""
