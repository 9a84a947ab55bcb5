"""`--engine kubernetes`: the manifest, checked against the MPIJob schema and the Dockerfile of its image."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distrib_launch.cli import launch as cli
from distrib_launch.engines import kubernetes
from tests.conftest import ROOT

SCHEMA = json.loads((ROOT / "tests/schemas/mpijob-v2beta1.json").read_text())
CRD = os.environ.get("DISTRIB_MPIJOB_CRD")
"""Path of the operator's published definition, manifests/base/kubeflow.org_mpijobs.yaml, if there is a copy."""

HOSTS = ("-H", "w[1-4]:8")
IMAGE = ("--engine", "kubernetes", "--image", "registry.example/distrib:1")
SCRIPT = "examples/train_cnn.py"


@pytest.fixture
def manifest(launch_in_process):
    """Return a function that parses the printed manifest as `kubectl` would."""

    def read(*arguments: object) -> dict[str, Any]:
        run = launch_in_process(*IMAGE, *arguments)
        assert run.code == 0, run
        loaded = yaml.safe_load(run.out)
        assert isinstance(loaded, dict)
        jsonschema.validate(loaded, SCHEMA)
        return loaded

    return read


def pod(job, role):
    return job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]


def container(job, role):
    (only,) = pod(job, role)["containers"]
    return only


def test_the_plan_becomes_workers_and_slots(manifest):
    job = manifest(*HOSTS, SCRIPT, "--epochs", "3")
    assert job["spec"]["slotsPerWorker"] == 8
    assert job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 4
    assert job["spec"]["mpiReplicaSpecs"]["Launcher"]["replicas"] == 1
    assert container(job, "Worker")["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "limits" not in container(job, "Launcher")["resources"]
    command = container(job, "Launcher")["command"]
    # Without --run-dir the launcher in the pod would choose a folder. The fixture sets one.
    assert command[:3] == ["distrib-launch", "-H", "/etc/mpi/hostfile"]
    assert command[-3:] == [SCRIPT, "--epochs", "3"]
    assert re.fullmatch(r"train-cnn-[0-9a-f]{8}", job["metadata"]["name"])
    for role in ("Launcher", "Worker"):
        assert container(job, role)["image"] == "registry.example/distrib:1"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container(job, role)["volumeMounts"]
        assert pod(job, role)["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
        assert pod(job, role)["securityContext"]["runAsNonRoot"] is True
        assert container(job, role)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_options_for_the_job_travel_and_those_for_the_hosts_do_not(manifest):
    job = manifest(
        *("-H", "a:2,b:2,c:2", "--exclude", "c", "--timeout", "2h", "--quiet", "--mpirun", "/opt/mpi/bin/mpirun"),
        *("-x", "NCCL_DEBUG=INFO", "-x", "LEARNING_RATE=0.1", SCRIPT, "--timeout", "5"),
    )
    assert job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    command = container(job, "Launcher")["command"]
    ours, script = command[: command.index(SCRIPT)], command[command.index(SCRIPT) :]
    assert script == [SCRIPT, "--timeout", "5"]
    assert ours[ours.index("--timeout") :][:2] == ["--timeout", "7200"]
    assert "--quiet" in ours
    assert ours[-2:] == ["-x", "LEARNING_RATE"]  # NCCL_ variables need no -x
    assert not {"--exclude", "--mpirun", "--engine", "--image"} & set(ours)
    env = {item["name"]: item["value"] for item in container(job, "Launcher")["env"]}
    assert (env["NCCL_DEBUG"], env["LEARNING_RATE"]) == ("INFO", "0.1")


def test_secrets_are_not_in_the_manifest(launch_in_process):
    words = (*IMAGE, *HOSTS, "--json", "-x", "MY_PASSWORD=s3cret", SCRIPT)
    run = launch_in_process(*words, env={"WANDB_API_KEY": "s3cret", "HF_HOME": "/h"})
    assert run.code == 0 and "s3cret" not in run.out, run
    job = json.loads(run.out)
    jsonschema.validate(job, SCHEMA)
    env = {item["name"]: item for item in container(job, "Launcher")["env"]}
    assert env["HF_HOME"]["value"] == "/h"
    for name in ("WANDB_API_KEY", "MY_PASSWORD"):
        assert env[name]["valueFrom"] == {"secretKeyRef": {"name": "distrib-secrets", "key": name}}
        assert f'--from-literal={name}="${name}"' in run.err


def test_what_the_launcher_inside_is_given_is_a_command_line_that_it_reads(manifest, launch_in_process):
    job = manifest(*HOSTS, "--timeout", "90", "--hang-timeout", "2m", "--grace", "30", "--bind", "numa", "-v", SCRIPT)
    command = container(job, "Launcher")["command"]
    assert job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["terminationGracePeriodSeconds"] > 30 + 30
    run = launch_in_process("--dry-run", "--json", "-H", "w[1-4]:8", *command[3:-1], ROOT / SCRIPT)
    assert run.code == 0, run
    assert json.loads(run.out)["bind"] == "numa"


@pytest.mark.parametrize("servers", [(), ("--servers", "1")])
def test_parameter_servers_take_no_slots_and_no_gpus(manifest, launch_in_process, servers):
    job = manifest("-H", "w[1-2]:8", "--mode", "async", *servers, SCRIPT)
    assert job["spec"]["slotsPerWorker"] == 8
    resources = container(job, "Worker")["resources"]
    assert resources == {"requests": {"cpu": "9"}, "limits": {"nvidia.com/gpu": "8"}}
    inside = container(job, "Launcher")["command"][3:-1]
    run = launch_in_process("--dry-run", "--json", "-H", "w[1-2]:8", *inside, ROOT / SCRIPT)
    assert run.code == 0, run
    assert json.loads(run.out)["world_size"] == 16


@pytest.mark.parametrize(
    ("given", "told"), [("14d", "1209600"), ("1d", "86400"), ("1234567.25", "1234567.25"), ("0.5", "0.5"), ("90", "90")]
)
def test_times_arrive_with_all_their_digits(manifest, given, told):
    command = container(manifest(*HOSTS, "--timeout", given, SCRIPT), "Launcher")["command"]
    assert command[command.index("--timeout") + 1] == told


def test_a_module_gives_its_name_to_note_and_job(launch_in_process):
    run = launch_in_process(*IMAGE, *HOSTS, "--json", "-m", "package.train_it", "--epochs", "3")
    assert run.code == 0, run
    assert "note: package.train_it " in run.err
    assert json.loads(run.out)["metadata"]["name"].startswith("train-it-")


def test_on_the_cpu_no_gpu_is_asked_for(manifest):
    job = manifest("-H", "w[1-2]:4", "-x", "CUDA_VISIBLE_DEVICES=", "--runtime-class", "nvidia", SCRIPT)
    assert container(job, "Worker")["resources"] == {"requests": {"cpu": "4"}}
    assert not {"tolerations", "runtimeClassName"} & set(pod(job, "Worker"))
    assert {"name": "CUDA_VISIBLE_DEVICES", "value": ""} in container(job, "Launcher")["env"]


def test_workers_are_given_what_they_need_besides_gpus(manifest):
    job = manifest(*HOSTS, "--pod-resource", "rdma/hca_shared_devices_a=1", SCRIPT)
    limits = pod(job, "Worker")["containers"][0]["resources"]["limits"]
    assert limits["rdma/hca_shared_devices_a"] == "1" and "nvidia.com/gpu" in limits
    assert "--pod-resource" not in pod(job, "Launcher")["containers"][0]["command"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "note: no RDMA resource is requested"),
        (["--pod-resource", "rdma/a=1"], "note: RDMA needs locked memory"),
        (["-x", "CUDA_VISIBLE_DEVICES="], ""),
        (["--pod-resource", "rdma=1"], "'rdma=1' is not a valid resource; write such as rdma/hca_shared_devices_a=1"),
    ],
)
def test_what_pods_need_for_infiniband_is_said(launch_in_process, words, says):
    run = launch_in_process(*IMAGE, *HOSTS, *words, SCRIPT)
    assert says in run.err and ("RDMA" in run.err) == ("RDMA" in says), run


def test_options_that_mean_nothing_to_pods_are_noted(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = ["--engine", "kubernetes", "--image", "i", *HOSTS, "--sync", ".", "--interface", "ib0", str(SCRIPT)]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert "note: left out, as pods have an image and a network of their own: --sync, --interface\n" in said.err
    assert "ib0" not in said.out


def test_a_runtime_class_is_for_pods_with_gpus(manifest):
    job = manifest(*HOSTS, "--runtime-class", "nvidia", SCRIPT)
    assert pod(job, "Worker")["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in pod(job, "Launcher")


def test_it_is_written_to_a_file_and_as_json(launch_in_process, tmp_path):
    run = launch_in_process(*IMAGE, *HOSTS, "--manifest", tmp_path / "job.yaml", SCRIPT)
    assert (run.code, run.out) == (0, ""), run
    assert f"kubectl create -f {tmp_path}/job.yaml" in run.err
    jsonschema.validate(yaml.safe_load((tmp_path / "job.yaml").read_text()), SCHEMA)
    run = launch_in_process(*IMAGE, *HOSTS, "--json", SCRIPT)
    jsonschema.validate(json.loads(run.out), SCHEMA)
    assert not run.run_dir.exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([*IMAGE, "-H", "a:8,b:4", SCRIPT], "b has 4 rank(s), a has 8, but an MPIJob has equal workers"),
        ([*IMAGE, "-H", "a:8,b:8", "-np", "12", SCRIPT], "b has 4 rank(s), a has 8"),
        ([*IMAGE, "-H", "a:8", "--include", "a:0,2", SCRIPT], "GPUs 0, 2 of a were chosen"),
        ([*IMAGE, SCRIPT], "the number of workers is unknown"),
        (
            [*IMAGE, "-H", "a:8,b:8", "-np", "8", "--mode", "async", "--servers", "1", SCRIPT],
            "b would run parameter servers",
        ),
        (["--engine", "kubernetes", *HOSTS, SCRIPT], "--image is missing"),
        ([*IMAGE, *HOSTS, "--manifest", "/nowhere/job.yaml", SCRIPT], "--manifest /nowhere/job.yaml: No such file"),
    ],
)
def test_what_cannot_be(launch_in_process, arguments, what):
    run = launch_in_process(*arguments)
    assert run.code == 2, run
    assert what in run.err.splitlines()[-1]


@pytest.mark.parametrize(
    "script",
    ["train.py", "1st.py", "Über große_Läufe.py", "-.py", "a" * 80 + ".py", "x-" * 40 + ".py", "dir/with.many.dots.py"],
)
def test_any_script_makes_a_valid_name(manifest, script):
    name = manifest(*HOSTS, "--", script)["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", f"{name}-worker-9999")
    assert len(f"{name}-worker-9999") <= 63


def expand(text: str, variables: dict[str, str]) -> str:
    """Expand `$(NAME)` and `$$` in commands and variables as the documentation of Kubernetes describes."""
    return re.sub(
        r"\$(\$|\(([^()]*)\))", lambda m: "$" if m[1] == "$" else variables.get(m[2], m[0]), text, flags=re.DOTALL
    )


@given(st.text(alphabet="$()HOME a{}'\"\n", max_size=30))
def test_kubernetes_leaves_every_argument_alone(text):
    assert expand(kubernetes.escape_dollars(text), {"HOME": "replaced", "": "replaced"}) == text


# -- the published definition ------------------------------------------------------------------------------------------


def published() -> dict[str, Any]:
    assert CRD
    versions = yaml.safe_load(Path(CRD).read_text())["spec"]["versions"]
    found: dict[str, Any] = next(v for v in versions if v["name"] == "v2beta1")["schema"]["openAPIV3Schema"]
    return found


def unknown_fields(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Return the fields that the definition does not name. A server drops or rejects them."""
    if isinstance(value, list):
        return [name for item in value for name in unknown_fields(item, schema.get("items", {}), f"{path}[]")]
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    found = []
    for key, item in value.items():
        below = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
        if below is None and path + key != "metadata" and not (path == "metadata." and "properties" not in schema):
            found.append(path + key)
        found += unknown_fields(item, below or {}, f"{path}{key}.") if path + key != "metadata" else []
    return found


@pytest.mark.skipif(not CRD, reason="no DISTRIB_MPIJOB_CRD: the operator's manifests/base/kubeflow.org_mpijobs.yaml")
class TestPublishedDefinition:
    def test_it_accepts_the_manifest(self, manifest):
        for arguments in ([], ["--runtime-class", "nvidia"], ["-x", "CUDA_VISIBLE_DEVICES="]):
            job = manifest(*HOSTS, *arguments, SCRIPT)
            jsonschema.validate(job, published())
            assert unknown_fields(job, published()) == []

    def test_our_schema_is_a_part_of_it(self):
        def compare(ours: dict[str, Any], theirs: dict[str, Any], path: str) -> None:
            if "type" in ours and "type" in theirs:
                assert ours["type"] == theirs["type"], path
            for name, below in ours.get("properties", {}).items():
                known = theirs.get("properties", {}).get(name) or theirs.get("additionalProperties")
                assert known, f"{path}.{name}"
                compare(below, known, f"{path}.{name}")
            assert set(theirs.get("required", [])) <= set(ours.get("required", [])), path
            assert set(ours.get("enum", [])) <= set(theirs.get("enum", ours.get("enum", []))), path
            if "items" in ours:
                compare(ours["items"], theirs["items"], f"{path}[]")

        compare(SCHEMA["properties"]["spec"], published()["properties"]["spec"], "spec")


# -- the image ---------------------------------------------------------------------------------------------------------

DOCKERFILE = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text() + (ROOT / "scripts/image").read_text())


def written_by_dockerfile(path: str) -> str:
    """Return the file that a `printf ... > path` of the image's steps writes."""
    (words,) = re.findall(rf"printf ((?:'[^']*' *)+) *> {re.escape(path)}", DOCKERFILE)
    return subprocess.run(["sh", "-c", f"printf {words}"], capture_output=True, text=True, check=True).stdout


def test_the_image_has_what_the_manifest_relies_on(manifest):
    job = manifest(*HOSTS, SCRIPT)
    user = pod(job, "Worker")["securityContext"]["runAsUser"]
    assert f"useradd --uid {user} " in DOCKERFILE
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)[-1] == str(user)
    assert re.findall(r"^WORKDIR (.*)$", DOCKERFILE, re.MULTILINE)[-1] == container(job, "Worker")["workingDir"]
    assert re.findall(r"^FROM .* AS (.*)$", DOCKERFILE, re.MULTILINE)[-1] == "cuda", "the default target"
    assert set(re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)) == {str(kubernetes.IMAGE.ssh_port)}
    (command,) = set(re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE))
    assert json.loads(command) == container(job, "Worker")["command"]
    config = container(job, "Worker")["command"][-1]
    assert config == f"{kubernetes.IMAGE.home}/sshd/config"
    server, client = (
        written_by_dockerfile("/home/trainer/sshd/config"),
        written_by_dockerfile("/etc/ssh/ssh_config.d/distrib.conf"),
    )
    for text in (server, client):
        assert f"Port {kubernetes.IMAGE.ssh_port}\n" in text
        assert f"{job['spec']['sshAuthMountPath']}/id_rsa" in text
    assert f"AuthorizedKeysFile {kubernetes.IMAGE.ssh_folder}/authorized_keys\n" in server
    assert kubernetes.IMAGE.interpreter == "/opt/distrib/bin/python3"
    assert "python3 -m venv /opt/distrib" in DOCKERFILE
    assert "SetEnv PATH=/opt/distrib/bin:" in server
    assert "NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility" in DOCKERFILE


@pytest.mark.cluster
def test_ssh_between_pods_as_the_image_sets_it_up(tmp_path):
    """The Dockerfile's sshd and ssh work under its user, with keys mounted as by the operator. Pods are namespaces."""
    for name, text in (
        ("config", written_by_dockerfile("/home/trainer/sshd/config")),
        ("client", written_by_dockerfile("/etc/ssh/ssh_config.d/distrib.conf")),
        ("passwd", f"{Path('/etc/passwd').read_text()}trainer:x:{kubernetes.IMAGE.user_id}:{kubernetes.IMAGE.user_id}::/home/trainer:/bin/sh\n"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
    for name in ("job", "other"):  # the operator's key: ECDSA, named id_rsa, owned by root, readable by all
        key = tmp_path / name / "id_rsa"
        key.parent.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", key], check=True)
        shutil.copy(tmp_path / name / "id_rsa.pub", tmp_path / name / "authorized_keys")
        key.chmod(0o644)
    (tmp_path / "run.sh").write_text(
        f"""set -e
cd {shlex.quote(str(tmp_path))}
ip link set lo up
mount --bind passwd /etc/passwd
mount -t tmpfs tmpfs /home
mkdir -p /home/trainer/.ssh /home/trainer/sshd
cp -r job other client /home
cp config /home/trainer/sshd
chown -R {kubernetes.IMAGE.user_id}:{kubernetes.IMAGE.user_id} /home/trainer
mount --bind /home/job /home/trainer/.ssh
export HOME=/home/trainer
pod="setpriv --reuid {kubernetes.IMAGE.user_id} --regid {kubernetes.IMAGE.user_id} --clear-groups --no-new-privs --bounding-set=-all"
$pod {" ".join(kubernetes.IMAGE.sshd)} 2> sshd.log &
server=$!
for _ in $(seq 100); do grep -q listening sshd.log && break; sleep 0.05; done
ssh="$pod ssh -F /home/client -o BatchMode=yes 127.0.0.1"
$ssh 'id -u; echo $PATH; echo $LD_LIBRARY_PATH' > said 2> words || echo refused > said
unshare --mount sh -c "mount --bind /home/other /home/trainer/.ssh; $ssh true" > /dev/null 2> impostor || echo refused >> impostor
kill $server
wait $server || true
"""
    )
    subprocess.run(["unshare", "--net", "--mount", "--propagation", "private", "sh", tmp_path / "run.sh"], timeout=200)
    said = (tmp_path / "said").read_text().splitlines()
    words = (tmp_path / "words").read_text() + (tmp_path / "sshd.log").read_text()
    user, path, libraries = said
    assert (user, path.split(":")[0], path.split(":")[-1]) == (
        str(kubernetes.IMAGE.user_id),
        "/opt/distrib/bin",
        "/bin",
    ), words
    assert {"/usr/local/nvidia/bin", "/usr/local/cuda/bin"} <= set(path.split(":"))
    assert libraries == "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"
    # A client with the keys of another job rejects this host.
    impostor = (tmp_path / "impostor").read_text()
    assert "Host key verification failed" in impostor and impostor.endswith("refused\n")
