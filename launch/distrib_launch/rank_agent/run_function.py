"""Runs a Python function as a rank's script: it comes in on standard input, and what it returns goes back.

Both are pickled, and both travel over the job's own channel, whose every frame is signed: the function is one that the
user handed to `distrib_launch.run`, and the value one that this function returned.
"""

from __future__ import annotations

import os
import pickle
import sys

from distrib.environment import DISTRIB_RESULT_FD


def main() -> int:
    if DISTRIB_RESULT_FD not in os.environ:
        print("distrib_launch.rank_agent.run_function is started by distrib_launch.run", file=sys.stderr)
        return 2
    told = pickle.load(sys.stdin.buffer)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.path += [folder for folder in told["path"] if folder not in sys.path]
    sys.argv = [told["name"]]
    value_descriptor = int(os.environ.pop(DISTRIB_RESULT_FD))
    function, arguments = pickle.loads(told["call"])  # now that its modules can be found
    value = function(*arguments)
    import cloudpickle

    with os.fdopen(value_descriptor, "wb") as file:
        cloudpickle.dump(value, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
