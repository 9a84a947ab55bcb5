"""Aggregation of the gradients of one host before they are sent to the servers."""
