"""Simulated network of hosts, racks and uplinks, and its records of a probe."""

from __future__ import annotations

import io
import random

from rich.console import Console

from distrib.cluster import shared_links
from distrib.cluster.inventory import Interface
from distrib.cluster.measurements import LinkMeasurement
from distrib.probe import stages
from distrib.probe.diagnosis import remeasure
from distrib.probe.diagnosis.check_inputs import collect_inputs
from distrib.probe.records import HostFacts, PairMeasurement, ProbeStarted, SharedLinkSides
from distrib.probe.second_pass import MAX_SIDES_ATTEMPTS
from distrib.probe.settings import QUICK

MB = 1e6


class Network:
    """Simulated hosts with equal links, in racks with shared uplinks; measures as the probe's coordinator does."""

    def __init__(
        self, hosts, *, noise=0.0, slow=None, racks=None, uplink=float("inf"), one_way=None, seed=0, rate=119.5 * MB
    ):
        self.names = [f"n{number + 1}" for number in range(hosts)]
        self.rate = rate
        self.slow = slow or {}
        self.racks = racks or [0] * hosts
        self.uplink = uplink
        self.one_way = one_way or {}
        self.random = random.Random(seed)
        self.noise = noise

    def uplink_of(self, rack):
        return self.uplink.get(rack, float("inf")) if isinstance(self.uplink, dict) else self.uplink

    def rates(self, phase):
        """Return each pair's rate when all pairs of the phase send at once and share the uplinks evenly."""
        crossing = {}
        for a, b in phase:
            if self.racks[a] != self.racks[b]:
                crossing.setdefault((self.racks[a], "up"), []).append((a, b))
                crossing.setdefault((self.racks[b], "down"), []).append((a, b))
        found = {}
        for a, b in phase:
            own = self.rate * min(self.slow.get(a, 1.0), self.slow.get(b, 1.0)) * self.one_way.get((a, b), 1.0)
            shares = [self.uplink_of(rack) / len(pairs) for (rack, _), pairs in crossing.items() if (a, b) in pairs]
            # Other load only slows a stream down; noise is symmetric.
            found[a, b] = min([own, *shares]) * (1 - abs(self.random.gauss(0, self.noise)))
        return found

    def records(self, mode=QUICK, facts=()):
        seen = [
            ProbeStarted(
                when="2026-01-01T00:00:00+00:00", mode=mode.mode, hosts=tuple(self.names), primary="tcp", facts=facts
            )
        ]
        for step in stages.plan_stages(len(self.names), mode, "tcp"):
            if step.kind == "transfer" and step.transport == "tcp" and not step.both_ways:
                for number, phase in enumerate(step.phases):
                    seen += self.measure(step.key, step.load, phase, number)
        for a, b in remeasure.links_to_remeasure(collect_inputs(seen), mode.max_remeasured):
            seen += self.measure("again", "alone", [(self.names.index(a), self.names.index(b))])
        inputs = collect_inputs(seen)
        base = inputs.alone
        for phase in remeasure.concurrent_pairs_slowed(inputs)[:1]:
            load = tuple((self.names.index(a), self.names.index(b)) for a, b in phase)

            def run(key, phase, base=base):
                made = self.measure(f"sharing/{key}", "sharing", phase)
                seen.extend(made)
                return {
                    pair: r.bandwidth_bytes_per_second / base.expected(r.source, r.target)
                    for pair, r in zip(phase, made, strict=True)
                }

            for _ in range(MAX_SIDES_ATTEMPTS):
                full = tuple(shared_links.slowed_pairs(run("repeat", load)))
                used = {host for pair in full for host in pair}
                others = tuple(host for host in range(len(self.names)) if host not in used)
                if found := shared_links.find_sides(full, run, others):
                    sides = (
                        tuple(self.names[host] for host in found.left),
                        tuple(self.names[host] for host in found.right),
                    )
                    seen.append(SharedLinkSides(sides=sides))
                    break
        return seen

    def measure(self, key, load, phase, number=0):
        return [
            PairMeasurement(stage=key, phase=number, source=self.names[a], target=self.names[b], transport="tcp", load=load,
                     bandwidth_bytes_per_second=rate, variation=0.01, repetitions=10, seconds=0.1,
                     streams=4)
            for (a, b), rate in self.rates(phase).items()
        ]  # fmt: skip


def two_nics(number, net, name="eth1"):
    """Return the facts of a host with a second NIC of unknown rate."""
    own = Interface(name="eth0", mtu=1500, speed_bytes_per_second=125 * MB)
    second = Interface(name=name, addresses=(address(number, net),))
    return facts(f"n{number}", interfaces=(own, second))


def facts(host, **changed):
    own = {
        "interfaces": (Interface(name="eth0", mtu=1500, speed_bytes_per_second=125 * MB),),
        **changed,
    }
    return HostFacts(host=host, address="198.18.0.1", interface="eth0", cpus=8, **own)


def address(n, net):
    return f"10.{net}.0.{n}/16"


def drawn(table, width=200):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def links_of_further_network(network, hosts=("n1", "n2", "n3", "n4"), rate=1200 * MB):
    """Return measurements on a network that the job does not use."""
    return tuple(
        LinkMeasurement(source=a, target=b, transport="tcp", load="alone", network=network, bandwidth_bytes_per_second=rate, variation=0.0,
                 streams=4)
        for a in hosts for b in hosts if a != b
    )  # fmt: skip


def of_kind(kind, records):
    return [record for record in records if isinstance(record, kind)]
