"""Views of the topology: model, tree, diagrams."""
