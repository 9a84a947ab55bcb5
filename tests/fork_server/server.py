"""Server process: import torch, then fork a child for every request (see `__init__.py`).

The child runs the script at the bottom of this file, as `__main__`, so that it ends as any Python program does. Only what the
server has imported stays as it is at the end: to free torch takes 0.25 CPU seconds.
"""

import atexit
import builtins
import ctypes
import gc
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import types
import weakref

NAMESPACES = ("net", "uts", "ipc", "mnt")
kept = {}  # the modules that the server has imported, by name


class Kept:
    """Entry of sys.modules in place of a module, so that Python does not clear the module at its end."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        return getattr(self.module, name)


def keep(kind=Kept, kept=kept, modules=sys.modules):
    modules.update({name: kind(module) for name, module in kept.items()})


atexit.register(keep)  # first, so that it runs last


def receive(connection):
    """Return a request and its descriptors."""
    first, descriptors, _, _ = socket.recv_fds(connection, 8, 64)
    left = int.from_bytes(first, "big")
    data = b""
    while len(data) < left:
        data += connection.recv(left - len(data))
    return json.loads(data), descriptors


def kill_session(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:  # it has no session yet
        os.kill(pid, signal.SIGKILL)


def become(request, descriptors):
    """Turn this forked child into the process that `request` describes."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.on_exit(libc._exit, None)  # before the destructors of torch, after those of libraries that the script loads
    os.setsid()
    for name in NAMESPACES:  # of a virtual host
        theirs = f"/proc/{request['pid']}/ns/{name}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{name}"):
            namespace = os.open(theirs, os.O_RDONLY)
            if libc.setns(namespace, 0):
                raise OSError(ctypes.get_errno(), theirs)
            os.close(namespace)
    high = [os.dup2(number, 900 + place) for place, number in enumerate(descriptors)]
    os.closerange(0, 900)
    for number, target in zip(high, request["descriptors"], strict=True):
        os.dup2(number, target, inheritable=True)
    os.closerange(900, 900 + len(high))
    os.environ.clear()
    os.environ.update(request["environ"])
    del os.environ["TEST_FORK_SERVER"]
    os.environ.pop("TEST_FORK_ALONE", None)
    os.chdir(request["directory"])
    os.sched_setaffinity(0, request["cpus"])
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    for limit, value in request["limits"]:
        resource.setrlimit(limit, tuple(value))
    sys.stdin = open(0, closefd=False)
    for name, number in (("stdout", 1), ("stderr", 2)):
        lines = request["unbuffered"] or number == 2 or os.isatty(number)
        stream = open(
            number, "w", closefd=False, buffering=1 if lines else -1, errors="backslashreplace" if number == 2 else None
        )
        if request["unbuffered"]:
            stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("PYTHONFAULTHANDLER"):
        import faulthandler

        faulthandler.enable()
    sys.path[:] = request["path"]
    import numpy
    import torch

    numpy.random.seed()
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def serve(path):
    """Serve requests. In a child, return the words of its script. In the server, exit when standard input ends."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(100)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    children = {}  # by connection and by the descriptor of the process
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                for pid, _ in children.values():
                    kill_session(pid)
                os._exit(0)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    request, descriptors = receive(connection)
                except (ValueError, OSError):  # its stand-in was killed meanwhile
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for opened in (selector, listener, connection, *(other for _, other in children.values())):
                        opened.close()  # now, because their numbers will be the script's
                    become(request, descriptors)
                    return request["words"]
                for number in descriptors:
                    os.close(number)
                handle = os.pidfd_open(pid)
                children[handle] = (pid, connection)
                selector.register(handle, selectors.EVENT_READ, handle)
                selector.register(connection, selectors.EVENT_READ, handle)
                connection.send(pid.to_bytes(8, "big"))
            elif key.data in children:
                pid, connection = children[key.data]
                if key.fd != key.data:  # the stand-in was killed
                    kill_session(pid)
                    selector.unregister(connection)
                    continue
                _, status = os.waitpid(pid, 0)
                selector.unregister(key.data)
                if connection.fileno() in selector.get_map():
                    selector.unregister(connection)
                try:
                    connection.send(status.to_bytes(8, "big"))
                except OSError:
                    pass
                connection.close()
                os.close(key.data)
                del children[key.data]


def prepare():
    import psutil  # noqa: F401  (of distrib)
    import torch
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.data

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports torch._dynamo
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
    kept.update((name, module) for name, module in sys.modules.items() if name not in ("__main__", "builtins", "sys"))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    gc.freeze()


def run(words):
    """Run a script or `-m module` as `__main__`."""
    if words[0] == "-m":
        sys.argv[:] = ["-m", *words[2:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])
        return
    sys.argv[:] = words
    sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__, module.__builtins__ = words[0], builtins
    module.__loader__ = type(__loader__)("__main__", words[0])
    try:
        with open(words[0], "rb") as file:
            code = compile(file.read(), words[0], "exec")
        exec(code, module.__dict__)
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this frame
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    prepare()
    run(serve(sys.argv[1]))
