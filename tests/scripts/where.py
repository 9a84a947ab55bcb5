"""Prints the name of the host it runs on."""

import socket

print(socket.gethostname())
