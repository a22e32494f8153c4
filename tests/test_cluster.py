"""internal/cluster: Slurm with a stub of srun, Kubernetes by its published schema."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from test_launcher import TOKEN, Hosts, need_netns

from ascend_rl.launch.launch_plan import SETTINGS
from ascend_rl.launch.time_limit import EXIT_RESUMES
from ascend_rl.weights import checkpoints

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "internal/cluster/kubernetes.yaml"
# As srun: the command once on each node, with its number; the status of the worst; all end when one fails.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do echo "srun $1"; shift; done
for i in 0 1; do
    ip netns exec "$TAG-$((i + 1))" env SLURM_NODEID=$i OF_THE_NODE=$((i + 1)) TMPDIR="$TMP/$((i + 1))" "$@" &
done
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit $status
"""


# A trainer on the second node that saves, resumes and asks as verl's does; 9 steps.
TRAINER = """
import json, os, pathlib, ray, sys, time
ray.init(log_to_driver=True)
@ray.remote(num_cpus=0, resources={"NPU": 1}, scheduling_strategy="SPREAD")
class Trainer:
    def where(self):
        return os.environ["OF_THE_NODE"]
    def fit(self, place):
        from ascend_rl.process.save_by import SaveBy
        from ascend_rl.weights import checkpoints
        found = checkpoints.latest(place)
        run, first = SaveBy(lambda step: 0.0), checkpoints.step_of(pathlib.Path(found)) + 1 if found else 1
        run.steps = 2 * [float(os.environ.get("LONGEST", 1))]
        for step in range(first, 10):
            print(f"Training Progress: |#| {step - 1}/9 [00:05<02:00]", flush=True)
            time.sleep(3)
            row = {"critic/rewards/mean": 0.5}
            if step == 9 or run.ends(step, False):
                with run.saving():
                    partial = pathlib.Path(checkpoints.begin(place, step))
                    (partial / "actor").mkdir()
                    checkpoints.commit(str(partial))
                row["timing_s/save_checkpoint"] = 0.1
            with open(os.environ["OUTPUT_DIR"] + "/metrics.jsonl", "a") as file:
                print(json.dumps({"step": step, "data": row}), file=file)
            if run.over:
                break
        return first, step
trainers = [Trainer.remote() for _ in range(2)]
(trainer,) = [t for t in trainers if ray.get(t.where.remote()) == "2"]
print("TRAINED %s to %s" % ray.get(trainer.fit.remote(sys.argv[1])), flush=True)
"""


@pytest.fixture
def hosts(root, tmp_path):
    need_netns()
    made = Hosts(root, tmp_path, 2)
    yield made
    made.close()


def slurm_job(h: Hosts, tmp_path: Path, script: str, *arguments: str, **variables) -> subprocess.Popen:
    """What Slurm does with a submitted slurm.sh on two hosts; requeued jobs are written down."""
    tools, home = tmp_path / "bin", tmp_path / "home"
    tools.mkdir(exist_ok=True)
    home.mkdir(exist_ok=True)
    (tools / "srun").write_text(SRUN)
    hosts = f"echo {h.address(1)}\necho {h.address(2)}"
    (tools / "scontrol").write_text(
        f"#!/bin/bash\nif [ $1 = requeue ]; then echo $2 >>{tmp_path}/requeued; exit; fi\n{hosts}\n"
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    path = tmp_path / "train_it.sh"
    path.write_text(script)
    copy = tmp_path / "slurm_script"  # Slurm runs a copy
    copy.write_bytes((ROOT / "internal/cluster/slurm.sh").read_bytes())
    job = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "nodes[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "77",
    }
    environ = {k: v for k, v in os.environ.items() if k not in ("GLOO_SOCKET_IFNAME", "VLLM_HOST_IP")}
    environ |= (
        {name: str(value) for name, value in variables.items()}
        | job
        | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "CLUSTER_TOKEN_DIR": str(home),
            "OUTPUT_DIR": str(tmp_path / "out"),
            "LOG_DIR": str(tmp_path / "logs"),
            "SRUN_ARGS": "--container-image=it",
            "SKIP_PREFLIGHT": "1",
            "VERBOSE": "1",
            "RAY_NUM_CPUS": "0",
            "RAY_OBJECT_STORE": "80000000",
            "TAG": h.tag,
            "TMP": str(h.tmp),
        }
    )
    command = ["bash", str(copy), "--npus-per-node", "2", str(path), "internal/cpu_env.sh", *arguments]
    return subprocess.Popen(
        command, cwd=tmp_path, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_a_job_of_slurm(hosts, tmp_path):
    """Both nodes run as one cluster, with a token of the job's own; the job has the script's status."""
    home = tmp_path / "home"
    script = f"stat -c 'token %a' {home}/.ascend_rl-77.token\necho \"TRAINED on $NNODES nodes, $1\"\nexit 7\n"
    process = slurm_job(hosts, tmp_path, script, "a b=1")
    text = process.communicate(timeout=600)[0]
    assert process.returncode == 7, text
    assert "srun --kill-on-bad-exit=0\n" in text and "srun --wait=0\n" in text  # the head ends the run
    assert "srun --ntasks-per-node=1\n" in text and "srun --container-image=it\n" in text
    assert "Ray has 4 of 4 NPUs" in text and "token 600\nTRAINED on 2 nodes, a b=1\n" in text
    assert not list(home.iterdir()) and not (tmp_path / "requeued").exists()


@pytest.mark.weekly
def test_a_job_whose_time_ends_is_requeued_and_continues(hosts, tmp_path):
    """First SIGTERM to one node (preemption), then the end of the job's time; the trainer is on the second
    node. Each start saves a step, ends with 75 on both nodes, is requeued, and the next one continues."""
    (tmp_path / "fit.py").write_text(TRAINER)
    script = f"python {tmp_path}/fit.py {tmp_path}/checkpoints"
    process = slurm_job(hosts, tmp_path, script, SAVE_GRACE_S=300, SLURM_JOB_END_TIME=int(time.time()) + 9999)
    metrics = tmp_path / "out/metrics.jsonl"
    until = time.monotonic() + 600
    while not metrics.exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    launchers = [pid for pid, name in hosts.processes(2).items() if name == "python" and is_launcher(pid)]
    os.kill(launchers[0], signal.SIGTERM)
    texts, last = [process.communicate(timeout=600)[0]], 0
    assert "SIGTERM: 300 s to save and end" in texts[0] and "asked to stop: the run saves" in texts[0]
    for longest_s in (1e6, 1):
        saved = checkpoints.step_of(checkpoints.newest(tmp_path / "checkpoints"))
        assert process.returncode == 75 and saved > last, texts[-1]
        assert f"saved at step {saved}: the same command resumes" in texts[-1]
        assert f"TRAINED {last + 1} to {saved}\n" in texts[-1]
        last = saved
        ends = int(time.time()) + 9999
        process = slurm_job(hosts, tmp_path, script, SLURM_JOB_END_TIME=ends, LONGEST=longest_s)
        texts.append(process.communicate(timeout=600)[0])
    assert "the next step (1100000 s) would not fit: the run saves" in texts[1]
    assert process.returncode == 0 and f"TRAINED {last + 1} to 9\n" in texts[-1], texts[-1]
    assert (tmp_path / "requeued").read_text() == "77\n77\n"


def is_launcher(pid: int) -> bool:
    return b"ascend_rl.launch.launch\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_slurm_alone_says_what_to_do(tmp_path):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = ["bash", str(ROOT / "internal/cluster/slurm.sh"), "x.sh"]
    result = subprocess.run(command, env=environ, text=True, capture_output=True)
    assert result.returncode == 1 and "this is no Slurm job; submit it: sbatch" in result.stderr


def test_the_manifest_is_valid_and_agrees_with_itself():
    """By the schema of Kubernetes, without unknown fields; what must be changed together agrees."""
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    config, service, job = documents
    assert [d["kind"] for d in documents] == ["ConfigMap", "Service", "Job"]
    settings, spec = config["data"], job["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    assert container["imagePullPolicy"] == "IfNotPresent"  # it is built here, and in no registry
    assert int(settings["NNODES"]) == spec["completions"] == spec["parallelism"]
    assert settings["NPUS_PER_NODE"] == container["resources"]["limits"]["huawei.com/Ascend910"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert settings["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert Path(settings["CLUSTER_TOKEN_FILE"]).parent == Path(mounts["token"])
    assert volumes["token"]["secret"]["defaultMode"] & 0o077 == 0
    assert int(settings["SAVE_GRACE_S"]) == pod["terminationGracePeriodSeconds"] - 60
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [EXIT_RESUMES]
    started = (ROOT / "run_container.sh").read_text()
    for name, volume in volumes.items():
        if "hostPath" in volume:
            assert volume["hostPath"]["path"] == mounts[name] and mounts[name] in started
    script, env_script = container["args"]
    header = (ROOT / script).read_text()
    assert (ROOT / env_script).is_file() and (ROOT / container["command"][1]).is_file()
    unknown = [name for name in settings if name not in SETTINGS and not re.search(rf"\b{name}\b", header)]
    assert not unknown


def test_the_schema_refuses_a_misspelt_field():
    document = yaml.safe_load(
        MANIFEST.read_text().split("---\n")[2].replace("completionMode", "completionMod")
    )
    with pytest.raises(kubernetes_validate.ValidationError, match="completionMod"):
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_pods_find_the_head_by_its_name(hosts, tmp_path):
    """The worker waits until the name exists; the index is the rank."""
    h, names = hosts, tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n")
    script = tmp_path / "train_it.sh"
    script.touch()
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o400)
    pod = {"MASTER_ADDR": "ascend-rl-0.ascend-rl", "NNODES": "2", "CLUSTER_TOKEN_FILE": str(token)}
    pod["SKIP_PREFLIGHT"] = "1"  # the script is empty
    bind = f"mount --bind {names} /etc/hosts; exec bash internal/cluster/kubernetes.sh --dry-run {script}"
    pods = [
        h.inside(
            i + 1, "unshare", "-m", "bash", "-euc", bind, JOB_COMPLETION_INDEX=i, CLUSTER_TOKEN="", **pod
        )
        for i in range(2)
    ]
    with pytest.raises(subprocess.TimeoutExpired):
        pods[1].wait(2)
    with names.open("a") as file:  # in place: it is mounted
        file.write(f"{h.address(1)} ascend-rl-0.ascend-rl\n")
    head, worker = (each.communicate(timeout=300)[0] for each in pods)
    assert f"this node   head, {h.address(1)} on eth0" in head, head
    assert f"this node   worker, {h.address(2)} on eth0" in worker, worker
    assert TOKEN not in head + worker
