"""Run a Python function as a rank's script: read it from standard input, write its return value to DISTRIB_RESULT_FD.

Both are pickled and pass through the signed control channel. The function is the one given to `distrib_launch.run`.
"""

from __future__ import annotations

import os
import pickle
import sys

from distrib.environment import DISTRIB_RESULT_FD


def main() -> int:
    """Run the function. Return the exit code."""
    if DISTRIB_RESULT_FD not in os.environ:
        print("distrib_launch.rank_agent.run_function is started by distrib_launch.run", file=sys.stderr)
        return 2
    import cloudpickle  # optional: the agent needs the standard library only

    call = pickle.load(sys.stdin.buffer)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())  # noqa: PTH109  (as `python -m` does, but after our imports)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.path += [folder for folder in call["path"] if folder not in sys.path]
    sys.argv = [call["name"]]
    result = int(os.environ.pop(DISTRIB_RESULT_FD))
    function, arguments = pickle.loads(call["call"])  # after sys.path was extended, so that its modules are found
    value = function(*arguments)
    with os.fdopen(result, "wb") as file:
        cloudpickle.dump(value, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
