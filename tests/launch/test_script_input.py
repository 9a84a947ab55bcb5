"""Input of a script, sent to the chosen ranks."""

from __future__ import annotations

from distrib.cluster import hostfile
from distrib_launch import plan_builder
from distrib_launch.console import Console
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.rank_agent.control_channel import Kind
from distrib_launch.supervisor.supervisor import Supervisor


def test_script_input_goes_to_the_chosen_ranks(tmp_path):
    plan = plan_builder.build_plan(
        LaunchOptions(script="x", directory="/", run_dir=str(tmp_path), engine="mpirun"),
        hostfile.parse_host_list("a:2,b:2"), None,
    )  # fmt: skip
    for wanted, ranks in (((0,), [0]), (None, [0, 1, 2, 3])):
        supervisor = Supervisor(plan, Console([]), script_input=b"words", input_ranks=wanted)
        sent = []
        supervisor.connections.send = lambda state, kind, payload, sent=sent: sent.append((state.plan.rank, kind))
        for state in supervisor.job.ranks:
            state.hello = {"port": 1}
        supervisor.assign()
        assert [rank for rank, kind in sent if kind is Kind.INPUT] == ranks
        supervisor.selector.close()
