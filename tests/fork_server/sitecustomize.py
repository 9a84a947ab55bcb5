"""Stand-in for a rank's interpreter: the fork server runs its script.

Python imports this module at its start. It returns at once, except in a process that an engine or the rank agent
started to run a rank's script, or a test a script alone.
"""

import os
import sys


def script_words(words):
    """Return the words of a Python command from its script or `-m` on, or None if it has neither."""
    for place, word in enumerate(words[1:], 1):
        if word == "-m" or not word.startswith("-"):
            return words[place:]
        if word not in ("-u", "-B", "-P"):
            return None
    return None


def stand_in(path, words):
    import contextlib
    import fcntl
    import json
    import resource
    import signal
    import socket

    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(path)
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with contextlib.suppress(OSError):
            if number != server.fileno() and (number < 3 or not fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC):
                descriptors.append(number)
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    request = {
        "pid": os.getpid(), "words": words, "environ": dict(os.environ), "directory": os.getcwd(), "path": sys.path,
        "unbuffered": "-u" in sys.orig_argv[:3] or bool(os.environ.get("PYTHONUNBUFFERED")), "descriptors": descriptors,
        "limits": [(limit, resource.getrlimit(limit)) for limit in limits], "cpus": list(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }  # fmt: skip
    waiting = []
    forwarded = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGABRT,
        signal.SIGQUIT,
    )
    for number in forwarded:
        signal.signal(number, lambda number, _: waiting.append(number))
    message = json.dumps(request).encode()
    socket.send_fds(server, [len(message).to_bytes(8, "big")], descriptors)
    server.sendall(message)
    child = int.from_bytes(server.recv(8), "big")
    if not child:
        os._exit(70)  # the server ended
    for number in waiting:
        os.kill(child, number)
    for number in forwarded:
        signal.signal(number, lambda number, _: os.kill(child, number))
    for number in descriptors:
        if number != 2:
            os.close(number)  # readers see the end when the script ends
    status = server.recv(8)
    os.close(2)
    status = os.waitstatus_to_exitcode(int.from_bytes(status, "big")) if status else 70
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def main():
    prefix, _, path = os.environ["TEST_FORK_SERVER"].rpartition(":")
    names = ("OMPI_COMM_WORLD_RANK", "RANK", "TEST_FORK_ALONE")
    is_script = any(name in os.environ for name in names) and "DISTRIB_CONTROL" not in os.environ
    if is_script and prefix == sys.prefix and (words := script_words(sys.orig_argv)):
        stand_in(path, words)


if "TEST_FORK_SERVER" in os.environ:
    main()
