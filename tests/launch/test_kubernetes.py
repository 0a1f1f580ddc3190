"""The manifests in launch/kubernetes: their contents, and their command on two pods."""

import configparser
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT
from launch_files import LAUNCH, PROBES, documents, instructions, parsed, under_torchrun
from served import Served

from parallel_llama import LLM, SamplingParams
from parallel_llama.cli.generate import OUTPUT, PART, RESUME
from parallel_llama.cli.serve import API_KEY_FILE, DRAIN, HOST, PORT
from parallel_llama.serve.server import _CLOSING_S

FOLDER = LAUNCH / "kubernetes"
LIMIT_S = 120
SET, INDEX = "leaderworkerset.sigs.k8s.io/name", "leaderworkerset.sigs.k8s.io/worker-index"
(SERVER,), (SERVICE,), POLICIES = map(
    documents, (f"kubernetes/{name}.yaml" for name in ("server", "service", "network-policy"))
)
(JOB,) = documents("kubernetes/generate-job.yaml")
GROUP = SERVER["spec"]["leaderWorkerTemplate"]
LEADER, WORKER = (GROUP[f"{role}Template"]["spec"] for role in ("leader", "worker"))
PODS = {"leader": LEADER, "worker": WORKER, "job": JOB["spec"]["template"]["spec"]}


def rank_of(pod: Any) -> Any:
    (container,) = pod["containers"]
    return container


def command(index: int, address: str = "host") -> list[str]:
    """The command of a pod, after Kubernetes has put the controller's variables in."""
    container = rank_of(WORKER if index else LEADER)
    values = {
        "LWS_GROUP_SIZE": str(GROUP["size"]),
        "LWS_WORKER_INDEX": str(index),
        "LWS_LEADER_ADDRESS": address,
    }
    words = [*container["command"], *container["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word) for word in words]


def test_pods_of_a_group_run_as_hosts_of_one_torchrun():
    for index in range(GROUP["size"]):
        program, *argv = command(index)
        torchrun, own = under_torchrun(argv)
        assert program == "torchrun"
        assert (torchrun.nnodes, torchrun.node_rank) == (str(GROUP["size"]), index)
        assert torchrun.master_addr == "host"
        limits = rank_of(WORKER if index else LEADER)["resources"]["limits"]
        assert int(torchrun.nproc_per_node) == limits.get("nvidia.com/gpu", 1)
        assert own == under_torchrun(command(0)[1:])[1]  # ranks refuse to differ
        flags = parsed(own)
    assert flags[HOST] == "0.0.0.0" and flags[API_KEY_FILE]


def test_probes_request_keyless_routes_at_server_port():
    (port,) = rank_of(LEADER)["ports"]
    flags = parsed(under_torchrun(command(0)[1:])[1])
    assert port["containerPort"] == flags[PORT]
    names = "startup", "readiness", "liveness"
    probes = {name: rank_of(LEADER)[f"{name}Probe"] for name in names}
    for probe in probes.values():
        assert probe["httpGet"]["path"] in PROBES and probe["httpGet"]["port"] == port["name"]
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths["liveness"] == "/health/live"  # a model that loads must not be killed
    assert {paths["startup"], paths["readiness"]} == {"/health/ready"}
    assert not any(name.endswith("Probe") for name in rank_of(WORKER))  # it does not serve
    (served,) = SERVICE["spec"]["ports"]
    assert served["targetPort"] == port["name"]
    assert matches(SERVICE["spec"]["selector"], labels("0"))
    assert not matches(SERVICE["spec"]["selector"], labels("1"))


def test_service_leaves_the_name_of_the_set_to_the_controller():
    """Regression: the controller did not create its headless service, because the name was taken.

    Without that service, the name of the leader has no address before the leader is ready.
    """
    assert SERVICE["metadata"]["name"] != SERVER["metadata"]["name"]
    first_line = (FOLDER / "service.yaml").read_text().partition("\n")[0]
    assert f"http://{SERVICE['metadata']['name']} " in first_line


def sleep_of(pod: Any) -> int:
    program, seconds = rank_of(pod)["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    return int(seconds)


def test_grace_periods_leave_time_for_running_requests():
    torchrun, own = under_torchrun(command(0)[1:])
    to_end = parsed(own)[DRAIN] + _CLOSING_S
    grace = LEADER["terminationGracePeriodSeconds"]
    assert to_end < torchrun.shutdown_timeout  # then torchrun kills the ranks
    assert sleep_of(LEADER) + torchrun.shutdown_timeout < grace  # then Kubernetes does
    assert sleep_of(LEADER) + to_end < sleep_of(WORKER) < grace
    assert WORKER["terminationGracePeriodSeconds"] == grace


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_pod_is_unprivileged_and_mounts_paths_of_its_command(pod):
    container = rank_of(pod)
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]} and not pod["automountServiceAccountToken"]
    security = pod["securityContext"]
    assert security["runAsNonRoot"] and security["seccompProfile"] == {"type": "RuntimeDefault"}
    image = dict(instructions(LAUNCH / "docker" / "Dockerfile"))
    ids = [security[name] for name in ("runAsUser", "runAsGroup")]
    assert image["USER"] == ":".join(map(str, ids)) and security["fsGroup"] == ids[1]

    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert len(mounts) == len(volumes)
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "emptyDir" in mounts["/cache"] and "XDG_CACHE_HOME=/cache" in image["ENV"]
    (model,) = (each for each in container["volumeMounts"] if each["mountPath"] == "/model")
    assert model["readOnly"]
    words = " ".join((*container["command"], *container.get("args", ())))
    for path in re.findall(r"(?<=[\s=\"])/[\w/-]+", words):
        assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts), path


def test_key_files_come_from_a_kubernetes_secret():
    (volume,) = (each for each in WORKER["volumes"] if each["name"] == "secrets")
    comment = (FOLDER / "kustomization.yaml").read_text()
    (made, files) = re.findall(r"create secret generic (\S+)((?: --from-file=\S+)+)", comment)[0]
    assert volume["secret"]["secretName"] == made
    # Not writable, and readable by the group that `fsGroup` gives to the files.
    assert volume["secret"]["defaultMode"] == 0o440
    (mount,) = (each for each in rank_of(WORKER)["volumeMounts"] if each["name"] == "secrets")
    named = [word.partition("=") for word in rank_of(WORKER)["args"] if "-file=" in word]
    assert {name for name, _, _ in named} == {"--api-key-file", "--secret-file"}
    for _, _, path in named:
        folder, _, key = path.rpartition("/")
        assert folder == mount["mountPath"] and f"--from-file={key}" in files.split()


def labels(index: str) -> dict[str, str]:
    """Labels that the controller gives to a pod."""
    return {SET: SERVER["metadata"]["name"], INDEX: index}


def matches(selector: Mapping[str, str], own: Mapping[str, str]) -> bool:
    return selector.items() <= own.items()


def is_allowed(rules: Sequence[Any], peer: str, other: Mapping[str, str], port: int) -> bool:
    """Whether a rule allows traffic with a pod; `peer` is the rules' key, "from" or "to"."""
    named = {each["name"]: each["containerPort"] for each in rank_of(LEADER)["ports"]}
    for rule in rules:
        pods = [each["podSelector"]["matchLabels"] for each in rule.get(peer, [])]
        ports = [named.get(each["port"], each["port"]) for each in rule.get("ports", [])]
        if (peer not in rule or any(matches(pod, other) for pod in pods)) and (
            "ports" not in rule or port in ports
        ):
            return True
    return False


def reaches(kind: str, pod: Mapping[str, str], other: Mapping[str, str], port: int) -> bool:
    """Whether the policies let a pod receive from ("Ingress") or send to ("Egress") another."""
    own = [
        policy["spec"]
        for policy in POLICIES
        if kind in policy["spec"]["policyTypes"]
        and matches(policy["spec"]["podSelector"]["matchLabels"], pod)
    ]
    peer = "from" if kind == "Ingress" else "to"
    rules = [rule for each in own for rule in each.get(kind.lower(), [])]
    return not own or is_allowed(rules, peer, other, port)


def test_only_ranks_reach_ranks_except_at_the_http_port():
    stranger = {"app": "another"}
    http = rank_of(LEADER)["ports"][0]["containerPort"]
    meeting = under_torchrun(command(0)[1:])[0].master_port
    for port in (http, meeting, 40123):
        for index, other in (("0", "1"), ("1", "0"), ("2", "1")):
            assert reaches("Ingress", labels(index), labels(other), port)
            assert reaches("Egress", labels(index), labels(other), port)
        assert not reaches("Ingress", labels("1"), stranger, port)
        assert not reaches("Egress", labels("0"), stranger, port)
        assert reaches("Ingress", labels("0"), stranger, port) == (port == http)
    assert reaches("Egress", labels("1"), stranger, 53)  # the leader's address is a name


def test_the_kustomization_has_every_file_and_the_version():
    (base,) = documents("kubernetes/kustomization.yaml")
    files = {path.name for path in FOLDER.iterdir()}
    assert files == {*base["resources"], "kustomization.yaml", "generate-job.yaml"}
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (image,) = base["images"]
    assert image["name"] == rank_of(LEADER)["image"] == rank_of(WORKER)["image"]
    tagged = f"{image['name']}:{setup['metadata']['version']}"
    assert f"{image['newName']}:{image['newTag']}" == tagged == rank_of(PODS["job"])["image"]
    assert f"-t {tagged} " in (LAUNCH / "docker" / "Dockerfile").read_text()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_the_manifests():
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, timeout=LIMIT_S
    )
    built = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert built["LeaderWorkerSet"]["spec"]["startupPolicy"] == "LeaderCreated", done.stderr
    group = built["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    for role in ("leader", "worker"):  # YAML's aliases and merge keys are resolved
        (container,) = group[f"{role}Template"]["spec"]["containers"]
        assert container["args"] == rank_of(LEADER)["args"]
        assert container["image"].endswith(":0.1.0")


def test_the_job_cuts_the_prompts_into_parts(tmp_path):
    """Each part's command runs as written, with a program that records its arguments."""
    (tmp_path / "prompts.jsonl").touch()  # the parser looks for it
    (tmp_path / "parallel-llama").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$ARGV"\n')
    (tmp_path / "parallel-llama").chmod(0o755)
    container, spec = rank_of(PODS["job"]), JOB["spec"]
    ((name, parts),) = (each.values() for each in container["env"])
    assert spec["completionMode"] == "Indexed" and int(parts) == spec["completions"]
    *shell, script = container["command"]
    script = script.replace("/prompts/", f"{tmp_path}/")
    for index in range(int(parts)):
        own = {"JOB_COMPLETION_INDEX": str(index), name: parts, "ARGV": str(tmp_path / "argv")}
        path = f"{tmp_path}:{os.environ['PATH']}"
        subprocess.run([*shell, script], env={**own, "PATH": path}, check=True, timeout=LIMIT_S)
        flags = parsed((tmp_path / "argv").read_text().splitlines())
        assert flags[PART] == (index, int(parts)) and flags[RESUME]
        assert flags[OUTPUT] == str(tmp_path / f"answers-{index}.jsonl")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_two_pods_match_one_rank_and_worker_ends_with_leader(model: Path, tmp_path: Path):
    """The worker gets no signal: it ends because the leader has closed the engine."""
    for name in ("api-keys", "ranks"):
        (tmp_path / name).write_text(f"{name} of a test that nobody else has")
        (tmp_path / name).chmod(0o600)
    places = {
        "/run/secrets/parallel-llama": str(tmp_path), "=/model": f"={model}", "=8000": "=0",
        "=29500": f"={free_port()}", "=0.0.0.0": "=127.0.0.1",
    }  # fmt: skip

    def pod(index: int) -> list[str]:
        argv = command(index, "127.0.0.1")[1:]
        for place, own in places.items():
            argv = [word.replace(place, own) for word in argv]
        return [sys.executable, "-m", "torch.distributed.run", *argv, "--dtype=float64"]

    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    worker = subprocess.Popen(pod(1), cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    try:
        with Served(command=pod(0), env=env) as served:
            key = (tmp_path / "api-keys").read_text()
            asked = {"prompt": "ab", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            bearer = {"Authorization": f"Bearer {key}"}
            status, _, body = served.send("POST", "/v1/completions", asked, bearer)
            assert status == 200 and served.send("POST", "/v1/completions", asked)[0] == 401
            assert served.get("/health/ready")["tp_size"] == 2
        assert worker.wait(LIMIT_S) is not None
    finally:
        worker.kill()
        worker.wait()
    with LLM(str(model), dtype="float64") as llm:
        (alone,) = llm.generate(["ab"], SamplingParams(max_tokens=8, temperature=0))
    assert json.loads(body)["choices"][0]["token_ids"] == list(alone.tokens)
