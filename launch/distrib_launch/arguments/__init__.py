"""Options of the commands: the parser, shared by the command line and `distrib_launch.run`."""
