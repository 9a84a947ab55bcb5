"""Run a rank's script in this process, as `python SCRIPT` or `python -m MODULE` would, and report how it ended.

The agent starts `python run_script.py SCRIPT [ARGS...]`. Two things differ from `python SCRIPT`. An uncaught exception is written to the
error file in torchrun's format. A failed rank does not wait in MPI_Finalize, as with `python -m mpi4py`, but without MPI_Abort.
It imports only the standard library before the script, whose own modules must not be shadowed; so names of variables are literals.
"""
# ruff: noqa: PTH100, PTH109, PTH119, PTH120, PTH123  (pathlib takes a third of the start of a short script)

from __future__ import annotations

import atexit
import builtins
import os
import sys
import time

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
LIBRARY = os.path.dirname(os.__file__)
LIBRARY_PATH = sys.path[sys.path.index(LIBRARY) if LIBRARY in sys.path else 1 :]  # without PYTHONPATH
LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/", "/lib/python3.")


class ExitReporter:
    """Reporter of the script's exit code when Python ends."""

    def __init__(self) -> None:
        self.exit_code = 0
        self._pid = os.getpid()
        status = os.environ.get("DISTRIB_STATUS_FD", "")
        self._status = int(status) if status.isdecimal() else -1
        self._inode = self._status_inode()
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)  # registered first, so that it runs last

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        while traceback and traceback.tb_frame.f_code.co_filename.startswith((FOLDER, "<frozen runpy>")):
            traceback = traceback.tb_next
        error = error.with_traceback(traceback)
        if os.getpid() == self._pid:  # not in a process that the script forked
            self.exit_code = 130 if issubclass(kind, KeyboardInterrupt) else 1
            self._report(b'{"failing": true}\n')  # before the traceback, which the launcher then prints once
            _write_error_file(error)
        sys.__excepthook__(kind, error, traceback)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        if not self.exit_code:
            self._report(b'{"closing": true, "independent": %s}\n' % (b"false" if has_joined_others() else b"true"))
            return
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
            # mpi4py would call MPI_Finalize, which waits for the other ranks, and those wait for this one.
            for stream in (sys.stdout, sys.stderr):
                _ignoring_errors(stream.flush)
            os._exit(self.exit_code)

    def _report(self, line: bytes) -> None:
        if self._inode and self._inode == self._status_inode():  # the script may have closed it
            _ignoring_errors(lambda: os.write(self._status, line))

    def _status_inode(self) -> int:
        try:
            return os.fstat(self._status).st_ino
        except OSError:
            return 0


def has_joined_others() -> bool:
    """Return True unless the script used torch and called neither distrib.init(), init_process_group() nor MPI."""
    loaded = sys.modules
    mpi, c10d = loaded.get("mpi4py.MPI"), loaded.get("torch.distributed.distributed_c10d")
    return (
        "torch" not in loaded
        or "distrib.training.job" in loaded
        or "horovod" in loaded
        or bool(mpi and mpi.Is_initialized())
        # _default_pg_init_method stays set after destroy_process_group().
        or bool(c10d and (c10d.is_initialized() or getattr(c10d, "_default_pg_init_method", None)))
    )


def _headline(error: BaseException) -> str:
    """Return `Type: message` in one line, with distrib's hint, the place of a SyntaxError and the last error of NCCL.

    Args:
        error: Uncaught exception of the script.
    """
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    if isinstance(error, SyntaxError) and error.filename:
        return f"{name}: {error.msg} ({os.path.basename(error.filename)}:{error.lineno})"
    text, hint = str(error), f"; {getattr(error, 'hint', None)}"
    if text.endswith(hint):  # of distrib: the first line and the hint
        first = text.removesuffix(hint).partition("\n")[0]
        return f"{name}: {first}{hint}"
    text, _, nccl = text.strip().partition("\nLast error:\n")
    first = ": ".join(line.splitlines()[0] for line in (text, nccl) if line.strip())
    return f"{name}: {first}" if first else name


def _is_secondary(error: BaseException | None) -> bool:
    """Return True if the error, or one that it follows from, is distrib's report that another rank or a server failed."""
    while error is not None:
        if getattr(error, "secondary", False) is True:
            return True
        error = error.__cause__ or error.__context__
    return False


def _own_part(report: Any) -> str:
    """Return the traceback of an error of distrib with the frames of the script only, and without its cause."""
    library = (os.path.dirname(str(sys.modules["distrib.errors"].__file__)) + os.sep, *LIBRARY_FOLDERS)
    own = [frame for frame in report.stack if not any(part in frame.filename for part in library)]
    report.stack[:] = own or report.stack
    report.__cause__ = report.__context__ = None
    return "".join(report.format()).rstrip("\n")


def _write_error_file(error: BaseException) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        folders, sys.path = (
            sys.path,
            LIBRARY_PATH,
        )  # without the folder of the script, whose modules may have these names
        try:
            import json  # only after a failure, because it would slow down every start
            import traceback
        finally:
            sys.path = folders

        report = traceback.TracebackException.from_exception(error)
        shown = "".join(report.format()).rstrip("\n")
        extra = {"py_callstack": shown[-65536:], "timestamp": str(int(time.time())), "secondary": _is_secondary(error)}
        if type(error).__module__ == "distrib.errors":
            extra["own_callstack"] = _own_part(report)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": _headline(error), "extraInfo": extra}}, file)
    except Exception:  # out of memory or of open files; stderr has the traceback
        return


def _ignoring_errors(call: Any) -> None:
    try:
        call()
    except (OSError, ValueError, AttributeError):
        return


def main() -> int:
    """Run the script that `sys.argv[1:]` names, in a fresh `__main__`. Return its exit code."""
    reporter = ExitReporter()
    path_is_safe = getattr(sys.flags, "safe_path", False)  # -P: Python inserted no folder at the front of sys.path
    del sys.argv[0]
    script = sys.modules["__main__"] = type(sys)("__main__")
    try:
        if sys.argv[0] == "-m":
            import runpy  # only for modules, because it would slow down the start of scripts

            del sys.argv[0]
            if not path_is_safe:  # the user's modules must not hide ours
                sys.path[:1] = [] if sys.argv[0].startswith(("distrib.", "distrib_launch.")) else [os.getcwd()]
            if sys.argv[0].startswith("distrib."):
                sys.path[:] = LIBRARY_PATH + [folder for folder in sys.path if folder not in LIBRARY_PATH]
            runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]  # `python -m` calls the same function
            return 0
        path = sys.argv[0]
        if not path_is_safe:
            sys.path[0] = os.path.dirname(os.path.realpath(path))
        loader = type(__loader__)("__main__", path)  # type: ignore[name-defined]
        script.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __builtins__=builtins)
        try:
            with open(path, "rb") as file:
                source = file.read()
        except OSError as error:
            print(
                f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr
            )
            reporter.exit_code = 2
            return 2
        exec(compile(source, path, "exec", dont_inherit=True), script.__dict__)
    except SystemExit as leaving:
        code = leaving.code
        reporter.exit_code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        sys.exit(code)  # distrib replaces sys.exit to learn of failures; the script may have raised SystemExit itself
    return 0
