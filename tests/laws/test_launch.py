"""The recipes of examples/launch: each starts the job that a plain torchrun starts, with the same bits at its end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostfile

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
STANDIN = ROOT / "tests" / "support" / "slurm"
OUTSIDE = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
STEPS = ["--steps", "12", "--every", "5"]
POD = "spec/replicatedJobs/template/spec/template/spec"  # where a JobSet describes its pods


def environment(tmp: Path, **more: str) -> dict[str, str]:
    """What a recipe is started with: torchrun of this interpreter on the path, this fzero, one thread."""
    bin = tmp / "bin"
    bin.mkdir(exist_ok=True)
    torchrun = bin / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    path = os.pathsep.join([str(STANDIN), str(bin), OUTSIDE.get("PATH", "")])
    return {**OUTSIDE, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def ended(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def digest(printed: str) -> str:
    (found,) = re.findall(r"digest (\w{16})", printed)
    return str(found)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of two ranks on one machine, by one_node.sh."""
    tmp = tmp_path_factory.mktemp("one")
    printed = ended([str(LAUNCH / "one_node.sh"), "--folder", str(tmp / "run"), *STEPS], environment(tmp, RANKS="2"))
    assert "steps 0 to 12 on 2 ranks" in printed
    return digest(printed)


@contextlib.contextmanager
def nodes(commands: list[list[str]], envs: list[dict[str, str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of some machines, which end with the block."""
    started = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, env in zip(commands, envs, strict=True)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()


@pytest.mark.acceptance
def test_several_nodes_on_loopback_end_with_the_same_bits(undisturbed: str, tmp_path: Path) -> None:
    env = environment(tmp_path, NODES="2", HEAD="127.0.0.1", PORT=port())
    command = [str(LAUNCH / "several_nodes.sh"), "--folder", str(tmp_path / "run"), *STEPS]
    with nodes([command, command], [env, env]) as started:
        printed = "".join(process.communicate(timeout=300)[0] for process in started)
        assert [process.returncode for process in started] == [0, 0], printed
    assert digest(printed) == undisturbed


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces with a link of 1 Gbit/s between them, as two machines."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"fz{os.getpid()}a", f"fz{os.getpid()}b"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
            hosts = Path("/etc/netns") / name / "hosts"  # what /etc/hosts is in it
            hosts.parent.mkdir(parents=True)
            hosts.write_text("127.0.0.1 localhost\n10.77.0.1 n0\n10.77.0.2 n1\n")
        ip("link", "add", "va", "netns", names[0], "type", "veth", "peer", "name", "vb", "netns", names[1])
        for name, link, address in zip(names, ("va", "vb"), ("10.77.0.1/24", "10.77.0.2/24"), strict=True):
            ip("-n", name, "addr", "add", address, "dev", link)
            for up in (link, "lo"):
                ip("-n", name, "link", "set", up, "up")
            shaped = f"tc qdisc add dev {link} root tbf rate 1gbit burst 256k latency 50ms"
            subprocess.run(["ip", "netns", "exec", name, *shaped.split()], check=False, capture_output=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr!r}")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.mark.acceptance
def test_two_machines_with_a_link_between_them_end_with_the_same_bits(
    undisturbed: str, tmp_path: Path, namespaces: list[str]
) -> None:
    """Each namespace sees its own address only. gloo is told the interface, as on any cluster."""
    commands, envs = [], []
    for name, link, address in zip(namespaces, ("va", "vb"), ("10.77.0.1", "10.77.0.2"), strict=True):
        more = {"HEAD": "10.77.0.1", "LOCAL": address, "GLOO_SOCKET_IFNAME": link}
        env = environment(tmp_path, NODES="2", PORT="29500", **more)
        recipe = [str(LAUNCH / "several_nodes.sh"), "--folder", str(tmp_path / "run"), *STEPS]
        commands.append(["ip", "netns", "exec", name, *recipe])
        envs.append(env)
    with nodes(commands, envs) as started:
        printed = "".join(process.communicate(timeout=300)[0] for process in started)
        assert [process.returncode for process in started] == [0, 0], printed
    assert digest(printed) == undisturbed


def stopped_and_queued_again(undisturbed: str, tmp_path: Path, **more: str) -> None:
    """The batch script with a stand-in for srun and scontrol, on two nodes of one rank: SIGTERM, requeue, resume."""
    requeued = tmp_path / "requeued"
    env = environment(
        tmp_path, SLURM_JOB_ID="7", SLURM_NNODES="2", SLURM_JOB_NODELIST="n[0-1]", PORT=port(),
        FZERO_LAUNCH=str(LAUNCH), FZERO_REQUEUED=str(requeued), **more,
    )  # fmt: skip
    run = tmp_path / "run"
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "--folder", str(run), *STEPS]
    with nodes([[*command, "--pause", "1"]], [env]) as (first,):
        until = time.monotonic() + 240
        while not list(run.glob("step-*")) and first.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
        first.send_signal(signal.SIGTERM)
        printed = first.communicate(timeout=240)[0]
    assert first.returncode == 0, printed
    assert requeued.read_text() == "7\n", printed
    assert "digest" not in printed
    again = ended(command, {**env, "PORT": port()})
    begun = int(re.findall(r"steps (\d+) to 12", again)[0])
    assert 0 < begun < 12
    assert digest(again) == undisturbed
    assert requeued.read_text() == "7\n", "a job that ended is not queued again"


@pytest.mark.acceptance
def test_slurm_stops_at_sigterm_is_queued_again_and_resumes_with_the_same_bits(
    undisturbed: str, tmp_path: Path
) -> None:
    stopped_and_queued_again(undisturbed, tmp_path)


@pytest.mark.acceptance
def test_slurm_on_two_machines_does_the_same(undisturbed: str, tmp_path: Path, namespaces: list[str]) -> None:
    """Each node is a host with a name and an address of its own, behind a link of 1 Gbit/s."""
    stopped_and_queued_again(undisturbed, tmp_path, FZERO_MACHINES=" ".join(namespaces))


@pytest.mark.acceptance
def test_accelerate_launch_starts_the_same_ranks(undisturbed: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed (pip install fzero[hf])")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / "accelerate.yaml")]
    command += ["--main_process_port", port(), str(LAUNCH / "job.py"), "--folder", str(tmp_path / "run"), *STEPS]
    assert digest(ended(command, environment(tmp_path))) == undisturbed


@pytest.mark.acceptance
def test_ray_starts_the_same_ranks(undisturbed: str, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason='ray is not installed (pip install "ray[train]")')
    command = [sys.executable, str(LAUNCH / "ray_train.py"), "--folder", str(tmp_path / "run"), "--steps", "12"]
    assert digest(ended(command, environment(tmp_path))) == undisturbed


@pytest.mark.acceptance
def test_the_deepspeed_launcher_starts_the_same_ranks(undisturbed: str, tmp_path: Path) -> None:
    """With `--no_local_rank` and without: then it passes `--local_rank` to the script."""
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:
        pytest.skip("deepspeed is not installed (pip install fzero[bench])")
    path = os.pathsep.join([str(ROOT), str(Path(found.origin).parents[1])])
    for number, flags in enumerate((["--no_local_rank"], [])):
        command = [sys.executable, "-m", "deepspeed.launcher.runner", *flags, "--num_gpus", "2"]
        command += ["--master_port", port(), str(LAUNCH / "job.py"), "--folder", str(tmp_path / f"run{number}"), *STEPS]
        assert digest(ended(command, environment(tmp_path, PYTHONPATH=path, DS_ACCELERATOR="cpu"))) == undisturbed


# --- without a process --------------------------------------------------------------------------------------------


def test_a_hostfile_is_a_torchrun_line_for_each_machine() -> None:
    hosts = hostfile.read("# cluster\nnode0 slots=8\nnode1 slots=4  # half\n\nnode2\n")
    assert hosts == {"node0": 8, "node1": 4, "node2": 1}
    lines = hostfile.lines(hosts, ["train.py", "--name", "a b"], job="j1")
    assert lines["node1"] == (
        "torchrun --nnodes 3 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id j1 "
        "train.py --name 'a b'"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node0 slots=x", "line 1 is 'node0 slots=x'"),
        ("node0 slots=0", "needed `NAME slots=N`"),
        ("a slots=1\na slots=2", "line 2 names 'a' again"),
        ("# nothing\n", "names no machine"),
        ("node0 slots=4 more", "line 1"),
    ],
)
def test_a_hostfile_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        hostfile.read(text)


def test_the_scripts_are_shell_and_executable() -> None:
    for script in (*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")):
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert all(os.access(script, os.X_OK) for script in LAUNCH.glob("*.sh"))


# The fields of a JobSet that has what the example has, `!` if it must be there: JobSet v1alpha2, batch/v1, core/v1.
JOBSET = {
    "": {"apiVersion!", "kind!", "metadata!", "spec!"},
    "metadata": {"name!", "namespace", "labels"},
    "spec": {
        "failurePolicy",
        "network",
        "replicatedJobs!",
        "successPolicy",
        "startupPolicy",
        "ttlSecondsAfterFinished",
    },
    "spec/failurePolicy": {"maxRestarts", "rules"},
    "spec/network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "spec/replicatedJobs": {"name!", "replicas", "template!", "dependsOn"},
    "spec/replicatedJobs/template": {"metadata", "spec"},
    "spec/replicatedJobs/template/spec": {"parallelism", "completions", "completionMode", "backoffLimit", "template!"},
    "spec/replicatedJobs/template/spec/template": {"metadata", "spec"},
    POD: {"containers!", "restartPolicy", "terminationGracePeriodSeconds", "volumes", "nodeSelector", "tolerations"},
    f"{POD}/containers": {"name!", "image", "command", "args", "env", "ports", "resources", "volumeMounts"},
    f"{POD}/containers/ports": {"containerPort!", "name", "protocol"},
    f"{POD}/containers/resources": {"limits", "requests"},
    f"{POD}/containers/volumeMounts": {"name!", "mountPath!", "readOnly", "subPath"},
    f"{POD}/volumes": {"name!", "persistentVolumeClaim", "hostPath", "emptyDir"},
    f"{POD}/volumes/persistentVolumeClaim": {"claimName!", "readOnly"},
}


def unfit(node: object, path: str = "") -> list[str]:
    """What of a JobSet is not a field there, or is missing. A path that JOBSET does not know holds any values."""
    if isinstance(node, list):
        return [fault for item in node for fault in unfit(item, path)]
    if not isinstance(node, dict) or path not in JOBSET:
        return []
    known = {name.rstrip("!") for name in JOBSET[path]}
    missing = {name[:-1] for name in JOBSET[path] if name.endswith("!")} - set(node)
    faults = [f"{path}: there is no field {name!r}" for name in node if name not in known]
    faults += [f"{path}: {name!r} is missing" for name in sorted(missing)]
    return faults + [fault for name in node for fault in unfit(node[name], f"{path}/{name}".lstrip("/"))]


def test_the_jobset_has_the_fields_of_its_schema() -> None:
    """The example as a whole was valid by the CRD of JobSet itself (August 2026), with unknown fields refused."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip install fzero[config])")
    found = yaml.safe_load((LAUNCH / "jobset.yaml").read_text(encoding="utf-8"))
    assert unfit(found) == []
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completionMode"] in ("Indexed", "NonIndexed")
    assert job["template"]["spec"]["restartPolicy"] in ("Never", "OnFailure"), "what batch/v1 allows in a Job"
    (container,) = job["template"]["spec"]["containers"]
    container["comand"] = container.pop("name")
    assert unfit(found) == [f"{POD}/containers: there is no field 'comand'", f"{POD}/containers: 'name' is missing"]


def test_the_jobset_starts_a_torchrun_for_each_of_its_pods() -> None:
    """What must agree in it: pods and nnodes, devices and ranks, the first pod's name and the rendezvous."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip install fzero[config])")
    found = yaml.safe_load((LAUNCH / "jobset.yaml").read_text(encoding="utf-8"))
    (nodes_job,) = found["spec"]["replicatedJobs"]
    job = nodes_job["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    arguments = dict(word.removeprefix("--").split("=") for word in container["command"] if word.startswith("--"))
    assert job["parallelism"] == job["completions"] == int(arguments["nnodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(arguments["nproc-per-node"])
    name = found["metadata"]["name"]
    assert arguments["rdzv-endpoint"] == f"{name}-{nodes_job['name']}-0-0.{name}:29500"
    assert container["ports"][0]["containerPort"] == 29500
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in job["template"]["spec"]["volumes"]}
