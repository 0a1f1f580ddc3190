"""The image and the compose file in launch/docker."""

import configparser
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from commands import ROOT
from launch_files import LAUNCH, PROBES, documents, instructions, parsed

from parallel_llama.cli.serve import API_KEY_FILE, DRAIN, HOST, PORT
from parallel_llama.serve.app import OPERATIONS
from parallel_llama.serve.server import _CLOSING_S

FOLDER = LAUNCH / "docker"
LIMIT_S = 60
IMAGE = list(instructions(FOLDER / "Dockerfile"))
(COMPOSE,) = documents("docker/compose.yaml")
SERVICES = COMPOSE["services"]
SERVER = SERVICES["server"]


def values(name: str) -> list[str]:
    return [text for each, text in IMAGE if each == name]


def test_image_runs_as_unprivileged_user_and_has_no_secrets():
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", values("USER")[-1])
    after = [name for name, _ in IMAGE[IMAGE.index(("USER", values("USER")[-1])) :]]
    assert "RUN" not in after
    # An argument would stay in the image's history, and a copy in one of its layers.
    assert {text.partition("=")[0] for text in values("ARG")} == {"DEVICE", "TORCH"}
    assert not values("COPY") + values("ADD")
    names = set(re.findall(r"(\w+)=", " ".join(values("ENV"))))
    assert names == {"HOME", "XDG_CACHE_HOME", "NVIDIA_DRIVER_CAPABILITIES"}
    assert json.loads(values("ENTRYPOINT")[0]) == ["parallel-llama"]


def test_healthcheck_requests_liveness_route_at_server_port():
    (check,) = values("HEALTHCHECK")
    url = urlsplit(re.findall(r"http://[^']+", check)[0])
    assert url.path in PROBES and url.path == "/health/live"
    assert str(url.port) == values("EXPOSE")[0] and url.port == parsed(SERVER["command"])[PORT]
    program = json.loads(re.search(r"\[.*\]", check)[0])  # type: ignore[index]
    compile(program[2], "healthcheck", "exec")
    assert program[:2] == ["python", "-c"]


def test_image_has_torch_version_of_environment_script():
    (version,) = re.findall(r"^TORCH=(.*)$", (LAUNCH / "environment.sh").read_text(), re.M)
    assert f"TORCH={version}" in values("ARG")


@pytest.mark.parametrize(
    ("device", "has_cpu_build", "expected"),
    [
        ("cpu", True, ["pip torch==2+cpu"]),
        ("cpu", False, ["pip torch==2+cpu", "pip torch==2"]),
        ("cuda", True, ["apt-get update", "apt-get libc6-dev", "pip torch==2"]),
        ("gpu", True, []),
    ],
)
def test_the_image_gets_the_build_of_torch_for_its_device(
    tmp_path, device, has_cpu_build, expected
):
    """The instruction runs as printed, with stand-ins for pip and apt-get."""
    for name in ("pip", "apt-get", "rm"):
        fails = "false" if name == "pip" and not has_cpu_build else "true"
        (tmp_path / name).write_text(
            f'#!/bin/sh\necho "{name} $(printf "%s\\n" "$@" | tail -n 1)" >> "$LOG"\n'
            f'case "$*" in *+cpu) {fails};; esac\n'
        )
        (tmp_path / name).chmod(0o755)
    script = re.sub(r"--mount=\S+\s*", "", values("RUN")[0])
    log = tmp_path / "log"
    log.touch()
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "DEVICE": device}
    done = subprocess.run(["sh", "-c", script], env={**env, "TORCH": "2"}, timeout=LIMIT_S)
    calls = [line for line in log.read_text().splitlines() if not line.startswith("rm ")]
    assert calls == expected and (done.returncode == 0) == bool(expected)


def test_build_context_has_only_files_of_the_package():
    rules = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [rule for rule in rules if not rule.startswith("#")]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    data = setup["options.data_files"]["share/parallel_llama/models"]
    needed = {
        "setup.cfg",
        "pyproject.toml",
        setup["metadata"]["long_description"].removeprefix("file: "),
        setup["metadata"]["license_files"],
        setup["options.packages.find"]["include"].strip().rstrip("*"),
        data.partition("/")[0],
    }
    assert rules[0] == "*" and {rule[1:] for rule in rules if rule[0] == "!"} == needed
    assert all((ROOT / name).exists() for name in needed)


def mounts(service: Any) -> dict[str, Any]:
    return {volume["target"]: volume for volume in service["volumes"]}


def test_server_container_publishes_one_port_on_loopback_only():
    flags = parsed(SERVER["command"])
    assert SERVER["ports"] == [f"127.0.0.1:{flags[PORT]}:{flags[PORT]}"]
    assert flags[HOST] == "0.0.0.0"  # else the published port leads nowhere
    assert flags[API_KEY_FILE] == f"/run/secrets/{SERVER['secrets'][0]}"
    assert SERVER["secrets"] == list(COMPOSE["secrets"])
    assert "${API_KEYS:?" in COMPOSE["secrets"]["api-keys"]["file"]  # a file outside of git
    assert SERVER["user"].startswith("${OWNER:?")
    assert mounts(SERVER)["/model"]["read_only"] and "--model=/model" in SERVER["command"]
    assert f"XDG_CACHE_HOME={mounts(SERVER)['/cache']['target']}" in values("ENV")[0]
    assert SERVER["shm_size"] and SERVER["read_only"] and "/tmp" in SERVER["tmpfs"]
    assert int(SERVER["stop_grace_period"].removesuffix("s")) > flags[DRAIN] + _CLOSING_S
    for service in SERVICES.values():
        assert {"cpus", "memory"} <= service["deploy"]["resources"]["limits"].keys()
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert "privileged" not in service and "network_mode" not in service


def test_compose_builds_image_from_the_dockerfile():
    context = (FOLDER / SERVER["build"]["context"]).resolve()
    assert context == ROOT and (context / SERVER["build"]["dockerfile"]) == FOLDER / "Dockerfile"
    arguments = {text.partition("=")[0] for text in values("ARG")}
    assert set(SERVER["build"]["args"]) <= arguments


def test_prometheus_scrapes_server_metrics_with_api_key():
    service = SERVICES["prometheus"]
    (config,) = documents("docker/prometheus.yml")
    (job,) = config["scrape_configs"]
    ((target,),) = (each["targets"] for each in job["static_configs"])
    assert target == f"server:{parsed(SERVER['command'])[PORT]}" and "server" in SERVICES
    assert job["metrics_path"] in {each.path for each in OPERATIONS}
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{service['secrets'][0]}"
    assert service["secrets"] == SERVER["secrets"] and service["user"].startswith("${OWNER}")
    (path,) = (word.partition("=")[2] for word in service["command"] if "config.file" in word)
    assert FOLDER / mounts(service)[path]["source"] == FOLDER / "prometheus.yml"
    (data,) = (word.partition("=")[2] for word in service["command"] if "tsdb.path" in word)
    assert [each.partition(":")[0] for each in service["tmpfs"]] == [data]


def test_grafana_shows_the_dashboard_of_the_server():
    service = SERVICES["grafana"]
    given = {
        each["target"]: yaml.safe_load(COMPOSE["configs"][each["source"]]["content"])
        for each in service["configs"]
    }
    assert all(path.startswith("/etc/grafana/provisioning/") for path in given)
    source, folder = given.values()
    (source,), (folder,) = source["datasources"], folder["providers"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    home = Path(service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == folder["options"]["path"]
    board = json.loads((FOLDER / mounts(service)[str(home)]["source"]).read_text())
    (variable,) = (each for each in board["templating"]["list"] if each["type"] == "datasource")
    assert variable["query"] == source["type"]
    assert SERVICES["prometheus"]["profiles"] == service["profiles"] == ["monitoring"]
    assert "profiles" not in SERVER


def has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="docker compose is not installed")
def test_docker_compose_accepts_the_file(tmp_path):
    env = {**os.environ, "MODEL": str(tmp_path), "API_KEYS": str(tmp_path), "OWNER": "1000"}
    command = ["docker", "compose", "-f", str(FOLDER / "compose.yaml")]
    command += ["--profile", "monitoring", "config", "--quiet"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
