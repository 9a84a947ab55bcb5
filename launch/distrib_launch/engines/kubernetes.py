"""Kubernetes engine: the plan as an MPIJob of Kubeflow's MPI operator, with the image of the Dockerfile.

Each host of the plan is one worker pod that serves ssh. The launcher pod runs `distrib-launch` on the hostfile that the
operator mounts, so the launch inside the cluster is an ordinary one. The engine writes a manifest and contacts no cluster.
Fields: kubeflow.org/v2beta1 as of MPI operator 0.8, https://github.com/kubeflow/mpi-operator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from distrib.errors import ConfigError
from distrib_launch.engines.engine import Engine
from distrib_launch.rank_environment import is_secret

if TYPE_CHECKING:
    from distrib_launch.launch_options import LaunchOptions, PodOptions
    from distrib_launch.launch_plan import LaunchPlan


class ImageProperties(NamedTuple):
    """Properties of the image; a test compares them with the Dockerfile."""

    user_id: int = 2000
    home: str = "/home/trainer"
    interpreter: str = "/opt/distrib/bin/python3"
    ssh_folder: str = "/home/trainer/.ssh"
    sshd: tuple[str, ...] = ("/usr/sbin/sshd", "-D", "-e", "-f", "/home/trainer/sshd/config")
    ssh_port: int = 2222


IMAGE = ImageProperties()

HOSTFILE = "/etc/mpi/hostfile"
"""Path at which the operator mounts the hostfile."""

SECRET = "distrib-secrets"
"""Name of the Secret with the values that must not be in a manifest, such as tokens."""


def refuse_pod_options(pods: PodOptions) -> None:
    """Raise ConfigError if options for pods are given with another engine.

    Args:
        pods: Options of the launch for pods.
    """
    given = {
        "--image": pods.image,
        "--manifest": pods.manifest,
        "--pod-resource": pods.resources,
        "--runtime-class": pods.runtime_class,
    }
    for flag, value in given.items():
        if value:
            raise ConfigError(
                f"{flag} applies to pods only",
                hint=f"add --engine kubernetes, or leave out {flag}",
                code="option-conflict",
            )


def ignored_options(options: LaunchOptions) -> list[str]:
    """Return the given options that have no effect because pods use the image's programs and the cluster's network.

    Args:
        options: Options of the launch.
    """
    given = {
        "--sync": options.sync,
        "--interface": options.interface,
        "--mpirun": options.mpirun,
        "--ssh-command": options.ssh_command,
    }
    return [flag for flag, value in given.items() if value is not None]


def in_image(options: LaunchOptions, script: str, run_dir: str) -> LaunchOptions:
    """Return the options as they are inside the image, where paths start at the home directory.

    Args:
        options: Resolved options.
        script: Script as the user named it.
        run_dir: Run directory as the user named it; empty: the default.
    """
    return msgspec.structs.replace(
        options,
        script=script,
        interpreter=IMAGE.interpreter,
        directory=IMAGE.home,
        run_dir=str(PurePosixPath(IMAGE.home, run_dir or "distrib-runs")),
        mpirun=None,
        ssh_command=None,
        sync=None,
    )


def _slots_per_worker(plan: LaunchPlan) -> int:
    """Return the number of workers per host, which must be equal: an MPIJob has a single `slotsPerWorker`.

    Parameter servers do not count; the launcher inside the cluster starts them beside the workers."""
    slots = plan.hosts[0].workers
    for host in plan.hosts:
        if not host.workers:
            raise ConfigError(
                f"--engine kubernetes: {host.name} would run parameter servers only, which an MPIJob cannot express",
                hint="leave out role=server and idle hosts: the servers then run beside the workers",
                code="option-conflict",
            )
        if host.workers != slots:
            raise ConfigError(
                f"--engine kubernetes: {host.name} has {host.workers} rank(s), {plan.hosts[0].name} has {slots}, but an MPIJob has equal workers",
                hint="give all hosts the same slots, and -np a multiple of them",
                code="option-conflict",
            )
        if host.chosen is not None:
            raise ConfigError(
                f"--engine kubernetes: GPUs {', '.join(map(str, host.chosen))} of {host.name} were chosen, but "
                "Kubernetes chooses which GPUs a pod gets",
                hint="choose whole hosts",
                code="option-conflict",
            )
    return slots


def manifest(
    plan: LaunchPlan, pods: PodOptions, *, words: Sequence[str], environment: Mapping[str, str], grace_seconds: float
) -> dict[str, Any]:
    """Return the MPIJob that runs a plan.

    Args:
        plan: Plan of the job.
        pods: Image, resources and RuntimeClass of the pods.
        words: Options for the launcher inside the cluster.
        environment: Variables that every rank gets from the user.
        grace_seconds: Time that ranks have between SIGTERM and SIGKILL.

    Raises:
        ConfigError: Hosts differ in their number of ranks, or GPUs were chosen.
    """
    image = pods.image or ""
    slots = _slots_per_worker(plan)
    name = _job_name(plan)
    labels = {"app.kubernetes.io/name": "distrib", "app.kubernetes.io/instance": name}
    gpu = any(rank.device != "cpu" for rank in plan.ranks)  # parameter servers run on the CPU
    launcher_pod = _pod("launcher", image, ["distrib-launch", "-H", HOSTFILE, *words, *plan.script[1:]], labels)
    container = launcher_pod["spec"]["containers"][0]
    # On the launcher only: it forwards them, and logins over ssh on the workers would not have them.
    container["env"] = [_variable(name, value) for name, value in environment.items()]
    container["resources"] = {"requests": {"cpu": "1", "memory": "2Gi"}}
    launcher_pod["spec"]["terminationGracePeriodSeconds"] = (
        math.ceil(grace_seconds) + 55
    )  # to end the ranks and write the result
    worker_pod = _pod("worker", image, IMAGE.sshd, labels)
    container = worker_pod["spec"]["containers"][0]
    container["resources"] = {"requests": {"cpu": str(max(host.ranks for host in plan.hosts))}}
    container["ports"] = [{"name": "ssh", "containerPort": IMAGE.ssh_port}]
    container["readinessProbe"] = {"tcpSocket": {"port": IMAGE.ssh_port}, "periodSeconds": 2, "failureThreshold": 30}
    worker_pod["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels},
        }
    ]
    if gpu:
        container["resources"]["limits"] = {"nvidia.com/gpu": str(slots), **pods.resources}
        worker_pod["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        if pods.runtime_class:
            worker_pod["spec"]["runtimeClassName"] = pods.runtime_class
    elif pods.resources:
        container["resources"]["limits"] = dict(pods.resources)
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "slotsPerWorker": slots,
            "mpiImplementation": "OpenMPI",
            "sshAuthMountPath": IMAGE.ssh_folder,
            "launcherCreationPolicy": "WaitForWorkersReady",
            # The launcher restarts ranks; the operator must not.
            "runPolicy": {"cleanPodPolicy": "Running", "ttlSecondsAfterFinished": 24 * 3600, "backoffLimit": 0},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher_pod},
                "Worker": {"replicas": len(plan.hosts), "restartPolicy": "Never", "template": worker_pod},
            },
        },
    }


def _pod(name: str, image: str, command: Sequence[str], labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the part common to launcher and worker pods: image, unprivileged user, shared memory."""
    container: dict[str, Any] = {
        "name": name,
        "image": image,
        "command": [escape_dollars(word) for word in command],
        "workingDir": IMAGE.home,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {
        "metadata": {"labels": dict(labels)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": IMAGE.user_id,
                "runAsGroup": IMAGE.user_id,
                "fsGroup": IMAGE.user_id,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            # The default of 64 MiB is too small for DataLoader workers, NCCL and MPI.
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        },
    }


def _job_name(plan: LaunchPlan) -> str:
    """Return the job's name in Kubernetes: a DNS label (RFC 1035) of the script's name and the job's."""
    stem = re.sub(r"[^a-z0-9]+", "-", _stem(plan).lower()).strip("-")
    if not stem[:1].isalpha():
        stem = f"job-{stem}".strip("-")
    # At most 40 characters: Kubernetes allows 63 for a pod, which adds `-worker-<number>` or `-launcher-<random>`.
    return f"{stem[: 39 - len(plan.attempt_id)].rstrip('-')}-{plan.attempt_id}"


def _script(plan: LaunchPlan) -> str:
    """Return the script's path or the module's name."""
    return plan.script[2] if plan.script[1] == "-m" else plan.script[1]


def _stem(plan: LaunchPlan) -> str:
    script = _script(plan)
    return script.rpartition(".")[2] if plan.script[1] == "-m" else Path(script).stem


def _variable(name: str, value: str) -> dict[str, Any]:
    """Return the entry of a variable in `env`. A manifest is shared and kept, so secrets refer to a Secret of the cluster."""
    if is_secret(name):
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": name}}}
    return {"name": name, "value": escape_dollars(value)}


def notes_on_pods(plan: LaunchPlan, environment: Mapping[str, str], resources: Mapping[str, str]) -> list[str]:
    """Return notes on RDMA between the pods, and the command that creates the Secret of the manifest.

    Args:
        plan: Plan of the job.
        environment: Variables that every rank gets from the user.
        resources: Values of `--pod-resource` by name.
    """
    notes = []
    has_rdma = any("rdma" in n or "infiniband" in n or n.startswith("vpc.amazonaws.com/efa") for n in resources)
    if len(plan.hosts) > 1 and any(rank.device != "cpu" for rank in plan.ranks):
        notes.append(
            "RDMA needs locked memory, and the pods' user is not root: allow it in the container runtime (LimitMEMLOCK=infinity for "
            "containerd), or NCCL uses TCP; distrib-topo check in the launcher's pod shows the limit"
            if has_rdma
            else "no RDMA resource is requested: NCCL uses TCP between pods (--pod-resource NAME=N, such as rdma/hca_shared_devices_a=1)"
        )
    if secrets := [name for name in environment if is_secret(name)]:
        words = " ".join(f'--from-literal={name}="${name}"' for name in secrets)
        notes.append(
            f"create the Secret with {', '.join(secrets)} for the pods first: kubectl create secret generic {SECRET} {words}"
        )
    return notes


def escape_dollars(text: str) -> str:
    """Escape text for commands and variables, in which Kubernetes replaces `$(NAME)`, and `$$` by `$`.

    Args:
        text: Word of a command, or value of a variable.
    """
    return text.replace("$", "$$")


class _Kubernetes(Engine):
    """MPIJob of Kubeflow's MPI operator; the launcher runs inside the cluster."""

    starts_ranks = False

    def command(self, plan: LaunchPlan, options: LaunchOptions) -> tuple[str, ...]:
        """Return the command that creates the job from the manifest."""
        if any(host.name == "localhost" for host in plan.hosts):
            raise ConfigError(
                "--engine kubernetes: the number of workers is unknown",
                hint="name a host with its slots for each worker: -H worker[1-4]:8",
                code="no-hosts",
            )
        _slots_per_worker(plan)
        return "kubectl", "create", "-f", "-"

    def notes(self, plan: LaunchPlan) -> tuple[str, ...]:
        """Return notes on files that the image needs, and on GPUs."""
        notes = [f"{_script(plan)} and its data must be in the image, or on a volume that you add to the manifest"]
        if any(rank.device == "auto" for rank in plan.ranks):
            notes.append("one GPU per rank is requested (for CPUs: -x CUDA_VISIBLE_DEVICES=)")
        return tuple(notes)


ENGINE = _Kubernetes()
