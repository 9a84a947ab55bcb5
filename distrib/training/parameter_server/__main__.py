import sys

from distrib.training.parameter_server.server import main

if __name__ == "__main__":
    sys.exit(main())
