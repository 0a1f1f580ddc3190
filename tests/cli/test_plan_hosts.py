"""`plan --hosts`: ranks of several hosts, and the network between them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from plan_output import Capture, page, plan

from parallel_llama.cli import main as command_line
from parallel_llama.cli.calibration import read_calibration
from parallel_llama.cli.hosts import read_hosts

LINK = {"latency_us": 50, "gbit_per_s": 8}
RATES = {"version": 1, "dtype": "float32", "quant": "none"}


def written(folder: Path, hosts: object) -> list[str]:
    path = folder / "hosts.json"
    path.write_text(hosts if isinstance(hosts, str) else json.dumps(hosts))
    return ["--hosts", str(path), "--max-seq-len", "512"]


def calibrated(folder: Path, name: str, *rates: float, **more: float) -> str:
    """Writes a calibration file and returns its name, relative to the hosts file."""
    ranks = [{"read_bytes_per_s": rate, "operations_per_s": 3e10} | more for rate in rates]
    (folder / name).write_text(json.dumps(RATES | {"ranks": ranks}))
    return name


def cpu_hosts(folder: Path, **more: Any) -> list[dict[str, Any]]:
    fast, slow = calibrated(folder, "fast.json", 4e9, 4e9), calibrated(folder, "slow.json", 2e9)
    return [
        {"name": "fast", "ranks": 2, "memory": 2, "calibration": fast, "link": LINK | more},
        {"ranks": 1, "memory": "2048MiB", "calibration": slow, "link": LINK},
    ]


def test_pieces_of_a_pipeline_have_their_own_rate_of_products(capsys, tmp_path):
    """A piece has 64 of the 512 tokens of a step; a step without stages has one of 512."""
    prefill_s = {}
    for rate in (3e10, 1.5e10):
        name = calibrated(tmp_path, f"{rate}.json", 4e9, piece_operations_per_s=rate)
        hosts = [{"ranks": 1, "calibration": name, "link": LINK}] * 2
        for pp in ("1", "2"):
            steps = plan(capsys, *written(tmp_path, hosts), "--pp", pp)["predicted"]["steps"]
            prefill_s[rate, pp] = steps["prefill"]["arithmetic_s"]
    assert prefill_s[1.5e10, "2"] == pytest.approx(2 * prefill_s[3e10, "2"], rel=1e-9)
    assert prefill_s[1.5e10, "1"] == prefill_s[3e10, "1"]


def test_hosts_and_calibration_may_be_pipes_of_the_shell(tmp_path):
    """Two readers of one command line, such as two ranks, both get the content of a pipe."""
    hosts = json.dumps([{"ranks": 2}])
    expected = read_hosts(written(tmp_path, hosts)[1])
    reader, writer = os.pipe()
    os.write(writer, hosts.encode())
    os.close(writer)
    try:
        assert read_hosts(f"/dev/fd/{reader}") == read_hosts(f"/dev/fd/{reader}") == expected
    finally:
        os.close(reader)
    path = tmp_path / calibrated(tmp_path, "fast.json", 4e9)
    reader, writer = os.pipe()
    os.write(writer, path.read_bytes())
    os.close(writer)
    try:
        assert read_calibration(f"/dev/fd/{reader}") == read_calibration(str(path))
    finally:
        os.close(reader)


def test_hosts_get_shards_by_speed_and_exchange_over_the_link(capsys, tmp_path):
    argv = written(tmp_path, cpu_hosts(tmp_path, latency_us=80, gbit_per_s=16))
    found = plan(capsys, *argv)
    assert found["hosts"] == [
        {"name": "fast", "ranks": [0, 2]},
        {"name": "host 1", "ranks": [2, 3]},
    ]
    assert [rank["memory_bytes"] for rank in found["ranks"]] == [2 << 30] * 3
    assert [rank["heads"] for rank in found["ranks"]] == [[0, 4], [4, 7], [7, 9]]
    assert found["exact"] is False  # the default on several hosts
    # 61 all-reduces and the exchange after the head. The host of rank 2 receives 2 messages of 576
    # values over a link of 10^9 bytes/s.
    step = found["predicted"]["steps"]["decode"]
    assert step["link_s"] == pytest.approx(62 * 80e-6 + 61 * 2 * 576 * 4 / 1e9, rel=1e-9)
    assert step["memory_s"] == pytest.approx(max(rank["step_s"] for rank in found["ranks"]))
    # Large tensors go round a ring: 2 (n - 1) / n of the bytes.
    prefill = found["predicted"]["steps"]["prefill"]
    ring = 61 * 512 * 576 * 4 * 2 * 2 / 3 / 1e9
    assert prefill["link_s"] == pytest.approx(62 * 80e-6 + ring, rel=1e-9)
    shown = " ".join(page(capsys, *argv).split())
    assert "hosts fast: ranks 0-1, host 1: rank 2; exchanges take" in shown


def test_values_of_a_rank_are_sent_to_another_host_once(capsys, tmp_path):
    """The link time does not depend on the number of ranks of the other host."""
    own = cpu_hosts(tmp_path)[0]
    found = plan(capsys, *written(tmp_path, [own, own]))
    link_s = found["predicted"]["steps"]["decode"]["link_s"]
    assert link_s == pytest.approx(62 * 50e-6 + 61 * 2 * 576 * 4 / 1e9, rel=1e-9)


def test_exact_sums_send_each_part_to_every_rank_of_other_hosts(capsys, tmp_path):
    found = plan(capsys, *written(tmp_path, cpu_hosts(tmp_path)), "--exact")
    gathered = (30 * (576 + 576 + 1536 + 576) + 2 * 576) * 4  # bytes of all ranks' parts
    link_s = found["predicted"]["steps"]["decode"]["link_s"]
    assert link_s == pytest.approx(122 * 50e-6 + 2 * gathered / 3 / 1e9, rel=1e-9)


def test_gpus_of_hosts_exchange_in_a_ring(capsys, tmp_path):
    hosts = [{"gpus": "4xH100", "link": LINK | {"gbit_per_s": 200}}] * 2
    argv = [*written(tmp_path, hosts), "--model", "llama-3-8b"]
    found = plan(capsys, *argv)
    one = plan(capsys, "--model", "llama-3-8b", "--max-seq-len", "512", "--gpus", "8xH100")
    assert found["device"] == "cuda" and found["tp_size"] == 8
    steps = found["predicted"]["steps"]["decode"], one["predicted"]["steps"]["decode"]
    assert steps[0]["memory_s"] == steps[1]["memory_s"]
    n_bytes = 65 * 4096 * 2 * 2 * 7 / 8
    link_s = 66 * (20e-6 + 2 * 50e-6) + n_bytes / 25e9
    assert steps[0]["link_s"] == pytest.approx(link_s, rel=1e-9)


def test_one_host_gives_the_plan_of_the_same_flags(capsys, tmp_path):
    argv = written(tmp_path, [{"ranks": 3, "memory": 2}])
    flags = ["--memory", "2,2,2", "--max-seq-len", "512", "--device", "cpu"]
    found = plan(capsys, *argv)
    assert found.pop("hosts") == [{"name": "host 0", "ranks": [0, 3]}]
    expected = plan(capsys, *flags)
    assert expected.pop("hosts") is None and found == expected


def test_fewer_ranks_than_calibrated_share_the_total_rate(tmp_path):
    file = calibrated(tmp_path, "four.json", 1e9, 1e9, 1e9, 1e9)
    _, path, *_ = written(tmp_path, [{"ranks": 2, "calibration": file}])
    found = read_hosts(path).calibration
    assert found is not None and [each.read_bytes_per_s for each in found.ranks] == [2e9, 2e9]


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("[{", "not JSON"),
        ({"ranks": 2}, "expected `array`, got `object`"),
        ([], "the list has no host"),
        ([{"ranks": 0}], "host 0: ranks: expected `int` >= 1"),
        ([{"ranks": 2, "link": LINK}, {"rank": 2}], "unknown field `rank`"),
        ([{}], "host 0: give either ranks or gpus"),
        ([{"ranks": 1, "gpus": "1xH100"}], "host 0: give either ranks or gpus"),
        ([{"gpus": "H100"}], "gpus='H100' has no number; use 8xH100"),
        ([{"gpus": "2xH9"}], "host 0: not GPUs such as"),
        ([{"gpus": "2xH100", "memory": 80}], "memory is for CPU ranks"),
        ([{"ranks": 1, "link": LINK}, {"gpus": "1xH100", "link": LINK}], "or none"),
        ([{"ranks": 1, "link": LINK}, {"ranks": 1}], "host 1: link is missing"),
        ([{"ranks": 1, "memory": 2, "link": LINK}, {"ranks": 1, "link": LINK}], "for all hosts"),
        ([{"ranks": 1, "memory": "much"}], "host 0: not a size"),
        ([{"ranks": 1, "memory": 1e300}], "host 0: not a size"),
        ([{"ranks": 1, "link": LINK | {"latency_us": 0}}], "host 0: link.latency_us: expected"),
        ([{"ranks": 1, "calibration": "none.json"}], "none.json"),
        ([{"ranks": 1000, "link": LINK}] * 2, "the hosts have 2000 ranks; the maximum is 1024"),
        ([{"ranks": 10}], "use 1 to 9 ranks"),
    ],
    ids=str,
)
def test_invalid_hosts_file_is_refused(capsys, tmp_path, hosts, said):
    assert command_line.main(["plan", *written(tmp_path, hosts)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--nproc 2", "--memory 2", "--gpus 2x24", "--fit"])
def test_hosts_cannot_be_combined_with_flags_for_ranks_or_fit(capsys, tmp_path, flag):
    argv = written(tmp_path, [{"ranks": 2}])
    assert command_line.main(["plan", *argv, *flag.split()]) == 2
    assert "--hosts and --" in capsys.readouterr().err


def test_a_calibration_in_another_format_is_refused(capsys: Capture, tmp_path):
    argv = written(tmp_path, cpu_hosts(tmp_path))
    assert command_line.main(["plan", *argv, "--quant", "int8"]) == 2
    assert "the calibration in --hosts" in capsys.readouterr().err


def test_pipeline_stages_decode_in_turn_and_overlap_in_prefill(capsys, tmp_path):
    """A prefill step runs in pieces of 64 tokens, so that all stages work at the same time."""
    names = [calibrated(tmp_path, f"{rate:.0f}.json", rate) for rate in (4e9, 2e9)]
    hosts = [{"ranks": 1, "calibration": name, "link": LINK} for name in names]
    argv = written(tmp_path, hosts)
    found, plain = plan(capsys, *argv, "--pp", "2"), plan(capsys, *argv)
    assert [rank["layers"] for rank in found["ranks"]] == [[0, 20], [20, 30]]  # as the rates
    layer = 576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536 + 2 * 576
    kv = 2 * 192 * 512
    read_s = [n * 4 * (layer + kv) / rate for n, rate in ((20, 4e9), (10, 2e9))]
    head = [rank["vocab"][1] - rank["vocab"][0] for rank in found["ranks"]]
    head_s = max(n * 576 * 4 / rate for n, rate in zip(head, (4e9, 2e9), strict=True))
    step = found["predicted"]["steps"]["decode"]
    assert step["memory_s"] == pytest.approx(sum(read_s) + head_s, rel=2e-3)
    x_s = 576 * 4 / 1e9
    assert step["link_s"] == pytest.approx(4 * 50e-6 + 3 * x_s, rel=1e-9)
    prefill = found["predicted"]["steps"]["prefill"]
    products_s = [2 * n * layer * 64 / 3e10 for n in (20, 10)]
    assert prefill["arithmetic_s"] == pytest.approx(8 * products_s[0] + products_s[1], rel=2e-3)
    assert prefill["link_s"] == pytest.approx(18 * 50e-6 + 512 * 3 * x_s, rel=1e-9)
    for one, other in ((found, plain), (plain, found)):
        assert one["other_stages"] == {"pp": other["pp"], **{k: other[k] for k in BOTH}}
    shown = " ".join(page(capsys, *argv).split())
    assert "otherwise with --pp 2, about" in shown


def test_prediction_of_a_pipeline_counts_layers_and_head_in_their_own_formats(capsys, tmp_path):
    """Regression: the bytes were divided by numbers of values, but the head of int4 has int8."""
    ranks = [{"read_bytes_per_s": 4e9, "operations_per_s": 3e10}]
    (tmp_path / "int4.json").write_text(json.dumps(RATES | {"quant": "int4", "ranks": ranks}))
    hosts = [{"ranks": 1, "calibration": "int4.json", "link": LINK}] * 2
    found = plan(capsys, *written(tmp_path, hosts), "--pp", "2", "--quant", "int4")
    layers = 30 * (576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536)
    head = 576 * 49152 // 2
    n_bytes = layers * 5 / 8 + 30 * 2 * 576 * 4 + head * 8.5 / 8  # with scales, and norms
    n_bytes += 512 * 30 * 2 * 192 * 4  # the KV cache
    memory_s = found["predicted"]["steps"]["decode"]["memory_s"]
    assert memory_s == pytest.approx(n_bytes / 4e9, rel=1e-3)


BOTH = "predicted", "unpredicted"


def test_pipeline_stage_sends_to_one_rank_of_another_host(capsys, tmp_path):
    """The ranks of a host receive into the same memory; the embedding goes around a ring."""
    link_s = []
    for gbit_per_s in (4, 8):
        hosts = cpu_hosts(tmp_path, gbit_per_s=gbit_per_s)
        calibrated(tmp_path, "fast.json", 4e9, 4e9, exchange_s=1e-5, link_bytes_per_s=1e10)
        found = plan(capsys, *written(tmp_path, hosts), "--pp", "2")
        link_s.append(found["predicted"]["steps"]["decode"]["link_s"])
    x_s = 576 * 4 / 1e9
    assert link_s[0] - link_s[1] == pytest.approx((2 + 4 / 3) * x_s, rel=1e-6)


def test_stages_over_two_hosts_are_not_compared(capsys, tmp_path):
    """Three ranks in two stages are 2 and 1, but these hosts have 1 and 2."""
    own = cpu_hosts(tmp_path)
    assert plan(capsys, *written(tmp_path, own))["other_stages"]["pp"] == 2
    assert plan(capsys, *written(tmp_path, own[::-1]))["other_stages"] is None


def test_stage_over_two_hosts_is_refused(capsys, tmp_path):
    """Regression: `plan` predicted the speed of stages that no run accepts."""
    hosts = cpu_hosts(tmp_path)
    assert plan(capsys, *written(tmp_path, hosts), "--pp", "2")["pp"] == 2
    assert command_line.main(["plan", *written(tmp_path, hosts[::-1]), "--pp", "2"]) == 2
    said = capsys.readouterr().err
    assert "--pp 2: ranks 0-1 are stage 0 and run on host 0 and fast" in said


def three_hosts(folder: Path, rates: list[float], latency_us: float) -> list[dict[str, Any]]:
    """One rank each; the last host has another latency."""
    links = [LINK, LINK, LINK | {"latency_us": latency_us}]
    return [
        {"calibration": calibrated(folder, f"{n}.json", rate), "link": link, "ranks": 1}
        for n, (rate, link) in enumerate(zip(rates, links, strict=True))
    ]


@pytest.mark.parametrize(
    ("rates", "latency_us", "left_out"),
    [
        ([4e9, 4e9, 4e9], 50, None),
        ([4e9, 4e9, 4e9], 5000, ["host 2"]),
        ([4e9, 4e9, 1e8], 50, ["host 2"]),
        ([4e9, 1e8, 4e9], 50, ["host 1"]),
        ([4e9, 1e8, 4e9], 50_000, ["host 2", "host 1"]),
    ],
)
@pytest.mark.parametrize("pp", ["1", "3"])
def test_hosts_that_slow_the_others_down_are_left_out(
    capsys, tmp_path, rates, latency_us, left_out, pp
):
    """The remaining hosts have the plan and the prediction of a file without the others."""
    hosts = three_hosts(tmp_path, rates, latency_us)
    argv = "--pp", pp, "--quant", "none"
    whole = plan(capsys, *written(tmp_path, hosts), *argv)
    found, shown = whole["fewer_hosts"], page(capsys, *written(tmp_path, hosts), *argv)
    if found is None:
        assert "leave out" not in shown
        assert left_out is None or pp == "3"  # a slow stage has few layers
        return
    assert found["left_out"] == left_out
    assert f"leave out  {' and '.join(left_out)}: the other hosts reach about " in shown
    kept = [host for n, host in enumerate(hosts) if f"host {n}" not in left_out]
    alone = plan(
        capsys, *written(tmp_path, kept), *argv[2:], "--pp", str(len(kept) if pp == "3" else 1)
    )
    assert found["predicted"] == alone["predicted"]
    assert found["ranks"] == alone["ranks"]
    speeds = [each["predicted"]["decode_tokens_per_s"] for each in (whole, alone)]
    assert speeds[1] > 1.05 * speeds[0]


def test_slow_host_whose_memory_is_needed_stays(capsys, tmp_path):
    hosts = three_hosts(tmp_path, [4e9, 4e9, 1e8], 50)
    for memory, is_needed in ((8, False), (0.58, True)):
        own = [host | {"memory": memory} for host in hosts]
        found = plan(capsys, *written(tmp_path, own), "--quant", "none")
        assert found["fits"]
        assert (found["fewer_hosts"] is None) == is_needed


def test_default_cache_of_a_rank_is_a_part_of_the_memory_of_its_host(capsys, tmp_path):
    """Regression: the default was computed from the sum of the memory of all hosts."""
    hosts = [{"ranks": 1, "memory": n, "link": LINK} for n in (8, 1)]
    given = ["--hosts", written(tmp_path, hosts)[1], "--max-seq-len", "8k", "--batch", "3"]
    found, shown = plan(capsys, *given), page(capsys, *given)
    tight = found["ranks"][1]
    free = (1 << 30) - tight["weight_bytes"] - tight["working_bytes"]
    assert found["fits"] and f"the default for a rank is {free / 2 / (1 << 20):.1f} MiB" in shown
