"""The files in launch/ that start ranks on a cluster and a server at boot."""

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import ROOT
from launch_files import LAUNCH, parsed, under_torchrun
from served import Served
from tiny_folder import write_chat_folder

from parallel_llama.cli.serve import DRAIN
from parallel_llama.serve.server import _CLOSING_S

LIMIT_S = 120
# Stands in for srun: starts the command after the options as three tasks (or N_TASKS) on one node.
# Without SRUN_CPUS_PER_TASK, srun binds each task to one core.
SRUN = """#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=1 ] && shift
[ "$SRUN_CPUS_PER_TASK" = "$SLURM_CPUS_PER_TASK" ] || exit 78
n=${N_TASKS:-3}
for ((rank = 0; rank < n; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=$n \\
        SLURM_NTASKS=$n SLURM_STEP_TASKS_PER_NODE=$n "$@" &
done
code=0
for ((rank = 0; rank < n; rank++)); do wait -n || code=$?; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[1-2]" ] && printf '%s\\n' 127.0.0.1 127.0.0.2
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("launch") / "model")


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch job, with stand-ins for the programs that it calls."""
    program = f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -m parallel_llama "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("parallel-llama", program)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "home").mkdir()
    return os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path / "home"),
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip


def test_scripts_use_the_python_that_made_an_active_environment(tmp_path):
    """A script that makes the environment again removes it first."""
    own = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(own)], check=True)
    script = f"source {LAUNCH / 'environment.sh'}; choose_python"
    env = {**os.environ, "PATH": f"{own / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and Path(done.stdout.strip()).is_file()
    assert not Path(done.stdout.strip()).is_relative_to(own)


def batch(cluster: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    script = ["bash", str(ROOT / "launch" / "slurm.sh"), *argv]
    done = subprocess.run(script, env=cluster, capture_output=True, text=True, timeout=LIMIT_S)
    assert not list((Path(cluster["HOME"])).glob(".parallel-llama-secret*"))
    return done


def test_a_slurm_job_gives_the_answer_of_one_rank(cluster, model):
    argv = ["generate", "--model", str(model), "--prompt", "ab", "--max-tokens=8", "--json"]
    seeded = [*argv, "--seed=1", "--dtype=float64"]
    alone = subprocess.run(
        [sys.executable, "-m", "parallel_llama", *seeded], cwd=ROOT, capture_output=True, text=True
    )
    together = batch(cluster, *seeded)
    assert together.returncode == 0, together.stderr
    assert "3 ranks" in together.stderr
    assert json.loads(together.stdout)["tokens"] == json.loads(alone.stdout)["tokens"]


def test_slurm_job_of_one_task_runs_the_command(cluster, model):
    """Regression: the script gave `--secret-file`, which a single task refuses."""
    argv = ["generate", "--model", str(model), "--prompt", "ab", "--max-tokens=2", "--json"]
    done = batch({**cluster, "N_TASKS": "1"}, *argv, "--nproc=2")
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stderr


def test_job_array_runs_the_parts_that_are_asked_for(cluster, tmp_path):
    """Regression: the number of parts was that of the tasks, so no task could run again alone."""
    (tmp_path / "parallel-llama").write_text('#!/usr/bin/env bash\necho "$@"\n')
    script = ["bash", str(LAUNCH / "slurm_array.sh"), "answers"]
    env = {**cluster, "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "2"}
    done = subprocess.run([*script, "8", "--model=a"], env=env, capture_output=True, text=True)
    assert done.stdout.split()[1:] == [
        "--model=a", "--part", "3/8", "--output", "answers-3.jsonl", "--resume",
    ]  # fmt: skip
    done = subprocess.run([*script, "--model=a"], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "'--model=a' is not the number of parts" in done.stderr


@pytest.mark.slow
def test_job_array_gives_the_answers_of_one_run(cluster, model, tmp_path):
    lines = [{"prompt": "ab"}, {"prompt": "b"}, {"prompt": "abc"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    argv = ["--model", str(model), "--prompts", str(path), "--max-tokens=8", "--seed=3"]
    script = ["bash", str(LAUNCH / "slurm_array.sh"), str(tmp_path / "answers"), "2"]
    script += [*argv, "--n=2"]
    for part in range(2):
        array = {"SLURM_ARRAY_TASK_ID": str(part), "SLURM_ARRAY_TASK_COUNT": "2"}
        done = subprocess.run(script, env={**cluster, **array}, timeout=LIMIT_S)
        assert done.returncode == 0
    whole = subprocess.run(
        [sys.executable, "-m", "parallel_llama", "generate", *argv, "--n=2", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    merged = [(tmp_path / f"answers-{part}.jsonl").read_text() for part in range(2)]
    assert [text.count("\n") for text in merged] == [4, 2]
    assert sorted("".join(merged).splitlines()) == sorted(whole.stdout.splitlines())


@pytest.mark.slow
def test_ray_actors_give_the_answers_of_one_run(model, tmp_path):
    """Regression: two actors reserved both cores, so tasks that read and write waited forever."""
    pytest.importorskip("ray", reason="ray is not installed")
    lines = [{"prompt": "ab"}, {"prompt": "b"}, {"prompt": "abc"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shared = ["--model", str(model), "--prompts", str(path), "--max-tokens=8"]
    output = tmp_path / "answers"
    own = [f"--output={output}", f"--actors={os.cpu_count()}", "--batch=1"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    script = [sys.executable, str(LAUNCH / "ray_batch.py"), *shared, *own]
    subprocess.run(script, env=env, check=True, capture_output=True, timeout=LIMIT_S)
    alone = subprocess.run(
        [sys.executable, "-m", "parallel_llama", "generate", *shared, "--temperature=0", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    expected = [json.loads(line)["text"] for line in alone.stdout.splitlines()]
    answers = [json.loads(line) for file in output.iterdir() for line in file.open()]
    found = {answer["prompt"]: answer["text"] for answer in answers}
    assert [found[line["prompt"]] for line in lines] == expected


def test_slurm_job_returns_exit_code_of_its_command(cluster):
    done = batch(cluster, "generate", "--model", "/no/such/model", "--prompt", "a")
    assert done.returncode == 2 and "/no/such/model" in done.stderr


# Prints its arguments, each followed by the line `--`.
ARGUMENTS = """#!/bin/sh
for each in "$@"; do printf '%s\\n--\\n' "$each"; done
"""


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", "zsh", "fish"])
def test_every_login_shell_reads_the_command_line_of_a_host(shell, hosts, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    words = ["a 'b", "two\nlines", '$HOME \\ \\\\ "', "", "*", "plain"]
    script = ["bash", str(LAUNCH / "hosts.sh"), "--print", "--bin", str(tmp_path), "node1:2"]
    shown = subprocess.run([*script, *words], env=hosts, capture_output=True, text=True, check=True)
    (tmp_path / "torchrun").write_text(ARGUMENTS)
    (tmp_path / "torchrun").chmod(0o755)
    _, _, line = shown.stdout.partition("\n")
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n--\n")[-9:-1] == [*words, "--secret-file", "FILE"]


# Runs the command on this host, as sshd would.
SSH = """#!/usr/bin/env bash
[ "$1 $2 $3" = "-o BatchMode=yes --" ] && [ $# = 5 ] || exit 77
echo "ssh to $4" >&2
exec bash -c "$5"
"""


@pytest.fixture
def hosts(tmp_path: Path) -> dict[str, str]:
    """The environment of launch/hosts.sh, with a stand-in for ssh."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "secrets").mkdir()
    folder = os.environ["PATH"]
    own = {"PATH": f"{tmp_path}:{folder}", "TMPDIR": str(tmp_path / "secrets")}
    return os.environ | own | {"PYTHONPATH": str(ROOT)}


def on_hosts(*argv: str) -> list[str]:
    """Two hosts, with 2 ranks and 1, both on this machine."""
    own = ["--bin", str(Path(sys.executable).parent), "127.0.0.1:2,me@127.0.0.1:1"]
    return ["bash", str(ROOT / "launch" / "hosts.sh"), *own, *argv]


def test_a_command_on_several_hosts_gives_the_answer_of_one_rank(hosts, model, tmp_path):
    """Quotes in the prompt reach the ranks."""
    argv = ["generate", "--model", str(model), "--prompt", "a 'b", "--max-tokens=8", "--json"]
    seeded = [*argv, "--seed=1", "--dtype=float64"]
    alone = subprocess.run(
        [sys.executable, "-m", "parallel_llama", *seeded], cwd=ROOT, capture_output=True, text=True
    )
    together = subprocess.run(
        on_hosts(*seeded), env=hosts, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert together.returncode == 0, together.stderr
    reached = re.findall("^ssh to (.*)$", together.stderr, re.M)
    assert sorted(reached) == ["127.0.0.1", "me@127.0.0.1"]
    assert "3 ranks" in together.stderr
    assert json.loads(together.stdout)["tokens"] == json.loads(alone.stdout)["tokens"]
    assert not list((tmp_path / "secrets").glob("tmp.*"))


@pytest.mark.slow
def test_a_server_on_several_hosts_ends_at_sigterm(hosts, model):
    command = on_hosts("serve", "--model", str(model), "--port", "0")
    with Served(command=command, env=hosts) as served:
        with urllib.request.urlopen(f"{served.url}/health", timeout=LIMIT_S) as answer:
            assert json.load(answer)["tp_size"] == 3
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["node1", "serve"], "'node1' is not a host and its number of ranks"),
        (["node1:2,-oProxyCommand=x:1", "serve"], "'-oProxyCommand=x:1' is not a host"),
        (["node1:0", "serve"], "'node1:0' is not a host"),
        (["--no", "node1:1", "serve"], "unknown option --no"),
        (["node1:1"], "name the hosts with their ranks, and a command"),
    ],
)
def test_invalid_hosts_arguments_are_refused_before_any_ssh(argv, expected, hosts):
    script = ["bash", str(ROOT / "launch" / "hosts.sh"), *argv]
    done = subprocess.run(script, env=hosts, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and expected in done.stderr and "ssh" not in done.stderr[10:]


def test_missing_torchrun_on_hosts_fails_the_command(hosts):
    command = on_hosts("serve")
    command[3] = "/no/such/folder"
    done = subprocess.run(command, env=hosts, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1 and "/no/such/folder/torchrun" in done.stderr


# Fails for the host `unreachable`, and otherwise runs the command on this host.
FAILING_SSH = """#!/usr/bin/env bash
[ "$4" = unreachable ] && exit 255
exec bash -c "$5"
"""
# A torchrun that waits for the ranks of other hosts until it gets SIGTERM.
WAITING_TORCHRUN = f"""#!/usr/bin/env bash
echo started >&2
exec {shlex.quote(sys.executable)} -c 'import time; time.sleep({LIMIT_S / 2})'
"""


@pytest.fixture
def waiting_hosts(hosts: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of launch/hosts.sh with a torchrun that waits; `sleep` returns at once."""
    programs = {"ssh": FAILING_SSH, "torchrun": WAITING_TORCHRUN, "sleep": "#!/bin/sh\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return hosts


@pytest.mark.parametrize("names", ["unreachable:1,node1:1", "node0:1,unreachable:1"])
def test_failed_session_of_any_host_ends_the_ranks_of_all_hosts(names, waiting_hosts):
    """Regression: if only host 0 failed, torchrun of host 1 waited 15 minutes for its store."""
    command = ["bash", str(LAUNCH / "hosts.sh"), names, "serve"]
    done = subprocess.run(
        command, env=waiting_hosts, capture_output=True, text=True, timeout=LIMIT_S / 4
    )
    assert done.returncode == 1


def test_sigterm_ends_the_ranks_of_all_hosts(waiting_hosts):
    command = ["bash", str(LAUNCH / "hosts.sh"), "node0:1,node1:1", "serve"]
    with subprocess.Popen(command, env=waiting_hosts, stderr=subprocess.PIPE, text=True) as script:
        assert script.stderr is not None
        for _ in range(2):
            assert script.stderr.readline() == "started\n"
        script.send_signal(signal.SIGTERM)
        assert script.wait(LIMIT_S / 4) == 0


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(ROOT / "launch" / "parallel-llama.service")
    return parser


def test_the_unit_serves_with_keys_and_ends_at_sigterm(model, tmp_path):
    program, *argv = shlex.split(unit()["Service"]["ExecStart"])
    (tmp_path / "keys").write_text("secret-key-of-a-test\n")
    (tmp_path / "keys").chmod(0o600)
    places = {"${CREDENTIALS_DIRECTORY}": str(tmp_path), "/srv/model": str(model), "8000": "0"}
    for place, own in places.items():
        argv = [each.replace(place, own) for each in argv]
    assert program.endswith("/bin/parallel-llama")
    with Served(command=[sys.executable, "-m", "parallel_llama", *argv]) as served:
        wanted = urllib.request.Request(f"{served.url}/v1/models")
        wanted.add_header("Authorization", "Bearer secret-key-of-a-test")
        with urllib.request.urlopen(wanted, timeout=LIMIT_S) as answer:
            assert json.load(answer)["data"]
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(LIMIT_S) == 0


def test_the_unit_allows_the_sockets_by_which_gloo_finds_interfaces():
    assert "AF_NETLINK" in unit()["Service"]["RestrictAddressFamilies"].split()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path):
    text = (ROOT / "launch" / "parallel-llama.service").read_text()
    text = text.replace("/opt/parallel-llama/bin/parallel-llama", "/bin/true")
    own = tmp_path / "parallel-llama.service"
    own.write_text(text)
    assert verify(["systemd-analyze", "verify", str(own)]) == ""
    own.write_text(text.replace("KillMode=mixed", "KillMode=mixture"))
    assert "kill mode" in verify(["systemd-analyze", "verify", str(own)])


def verify(command: Sequence[str]) -> str:
    """The lines of a checker's output about the unit file."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    return "\n".join(line for line in done.stderr.splitlines() if "parallel-llama.service" in line)


SH = re.compile(r"^```sh\n(.*?)^```$", re.S | re.M)
COMMENT = re.compile(r"^#   (.*)$", re.M)


def printed() -> list[str]:
    """The commands of docs/deploy.md, and those in the comments of the files in launch/."""
    blocks = SH.findall((ROOT / "docs" / "deploy.md").read_text())
    files = [path for path in LAUNCH.rglob("*") if path.is_file() and "bench" not in path.parts]
    own = [path for path in files if path.suffix in ("", ".sh", ".service", ".yaml", ".conf")]
    blocks += ["\n".join(COMMENT.findall(path.read_text())) for path in own]
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


COMMANDS = list(dict.fromkeys(filter(None, printed())))


def test_every_printed_command_has_known_flags_and_existing_files(tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").touch()  # the parser looks for it
    monkeypatch.chdir(tmp_path)
    kinds = set()
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        if words[0] == "torchrun":
            torchrun, argv = under_torchrun(words[1:])
            # torchrun kills ranks after its timeout, whatever --drain allows.
            assert parsed(argv)[DRAIN] + _CLOSING_S < torchrun.shutdown_timeout, line
            words = ["parallel-llama", *argv]
        if words[:2] == ["docker", "run"]:
            words = words[words.index("parallel-llama:0.1.0") :]
        if "launch/slurm_array.sh" in words:  # the next words: names of outputs, parts
            words = [
                "parallel-llama",
                "generate",
                *words[words.index("launch/slurm_array.sh") + 3 :],
            ]
        if words[0] in ("parallel-llama", "parallel-llama:0.1.0") or "slurm.sh" in line:
            argv = words[2:] if "slurm.sh" in line else words[1:]
            parsed(argv)
            kinds.add(argv[0])
        for word in words:
            assert not word.startswith("launch/") or (ROOT / word).exists(), line
    assert kinds == {"serve", "generate", "plan"}


def test_documented_hosts_belong_to_one_torchrun():
    lines = [shlex.split(line)[1:] for line in COMMANDS if line.startswith("torchrun --nnodes")]
    hosts, commands = zip(*map(under_torchrun, lines), strict=True)
    assert [host.node_rank for host in hosts] == list(range(int(hosts[0].nnodes)))
    for host in hosts:
        assert {**vars(host), "node_rank": 0} == vars(hosts[0])
    assert all(command == commands[0] for command in commands)


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_bash_can_parse_a_script(script):
    done = subprocess.run(["bash", "-n", str(LAUNCH / script)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
