"""Print the name of the host."""

import socket

print(socket.gethostname())
