"""`python -m tests.virtual_cluster`: build a virtual cluster by hand, log in, break it, take it down."""

from __future__ import annotations

import argparse
import os
import sys

from tests.virtual_cluster.virtual import Cluster, ClusterUnavailable, names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.virtual_cluster", description=__doc__)
    parser.add_argument("--name", default="play", help="which cluster (default: play)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="build a cluster")
    up.add_argument("hosts", type=int, help="how many hosts")
    up.add_argument("--slots", type=int, default=1, help="slots per host in its hostfile")
    up.add_argument("--rate", help="link rate of every host, for example 1gbit")
    verbs.add_parser("down", help="remove the cluster and everything that runs on it")
    verbs.add_parser("list", help="clusters that are up")
    run = verbs.add_parser("run", help="run a command on a host (default: a shell)")
    run.add_argument("host")
    run.add_argument("command", nargs=argparse.REMAINDER)
    for verb, text in (
        ("cut", "take a host's link down"),
        ("lose", "switch a host off"),
        ("restore", "bring it back"),
        ("wall", "put a firewall before a host that lets in ssh alone"),
        ("raise_mtu", "give all hosts jumbo frames, and all switch ports but this host's"),
    ):
        verbs.add_parser(verb, help=text).add_argument("host")
    shape = verbs.add_parser("shape", help="change a host's link rate")
    shape.add_argument("host")
    shape.add_argument("rate", help="for example 200mbit")
    options = parser.parse_args()

    if options.verb == "list":
        print("\n".join(names()) or "no cluster is up")
        return 0
    if options.verb == "up":
        if options.name in names():
            parser.error(f"{options.name} is up already; take it down first, or choose another --name")
        cluster = Cluster(options.hosts, slots=options.slots, rate=options.rate, name=options.name)
        try:
            cluster.up()
        except BaseException as error:
            cluster.down()
            if isinstance(error, (ClusterUnavailable, ValueError)):
                parser.error(str(error))
            raise
        print(f"up: {', '.join(cluster.hosts)}; hostfile {cluster.hostfile}")
        name = f" --name {options.name}" if options.name != "play" else ""
        print(
            f"try: python -m tests.virtual_cluster{name} run n1 distrib-launch -H {cluster.hostfile} examples/train_cnn.py"
        )
        return 0
    if options.name not in names():
        parser.error(f"no cluster {options.name} is up")
    cluster = Cluster.load(options.name)
    if options.verb == "down":
        cluster.down()
        return 0
    if options.host not in cluster.hosts:
        parser.error(f"no host {options.host}; there are {', '.join(cluster.hosts)}")
    if options.verb == "run":
        command = cluster.enter(options.host, options.command or [os.environ.get("SHELL", "sh")])
        os.execvp(command[0], command)
    elif options.verb == "shape":
        try:
            cluster.shape(options.host, options.rate)
        except ValueError as error:
            parser.error(str(error))
    else:
        getattr(cluster, options.verb)(options.host)
    return 0


if __name__ == "__main__":
    sys.exit(main())
