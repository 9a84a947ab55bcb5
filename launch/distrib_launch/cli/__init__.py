"""The commands: arguments and text."""
