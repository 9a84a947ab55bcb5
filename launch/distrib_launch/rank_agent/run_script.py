"""Start `script_runner` from its compiled form: Python compiles the file on its command line anew at every start."""

import sys

NAME = "distrib_launch.rank_agent.script_runner"

if __name__ == "__main__":
    path = __file__.removesuffix("run_script.py") + "script_runner.py"
    runner = {"__name__": NAME, "__file__": path, "__loader__": __loader__}  # type: ignore[name-defined]
    exec(type(__loader__)(NAME, path).get_code(NAME), runner)  # type: ignore[name-defined]
    sys.exit(runner["main"]())
