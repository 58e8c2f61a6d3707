"""What servers of language models show: names of each, histograms of several replicas, and what is not told stays absent."""

import pytest

from gpuscale.autoscaler.domain import serving
from gpuscale.autoscaler.signals.sources import ReplicaServers
from tests.support.clock import ManualClock
from tests.support.llm_model import Ask, LlmServer, Speed

BOUNDS = (0.1, 0.5, 1.0)
NONE = serving.Latencies(BOUNDS, (0, 0, 0, 0))
PAGES = {
    "vllm": (
        (
            'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 2\n'
            "vllm:num_requests_waiting 4.0 1700000000000\nvllm:kv_cache_usage_perc 0.25\n"
            'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.5"} 8\n'
            'vllm:inter_token_latency_seconds_bucket{engine="1",le="0.5"} 1\n'
            'vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf"} 9\n'
            'vllm:inter_token_latency_seconds_bucket{engine="1",le="+Inf"} 1\n'
        ),
        serving.ServerReading(
            running=5, waiting=4, kv_cache_percent=25, itl=serving.Latencies((0.5,), (9, 10))
        ),
    ),
    "an earlier vllm": (
        "vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.5\n",
        serving.ServerReading(running=1, kv_cache_percent=50),
    ),
    "sglang": (
        (
            "sglang:num_running_reqs 8\nsglang:num_queue_reqs 0\nsglang:token_usage 0.5\nsglang:prompt_tokens_total 7\n"
            "sglang:time_to_first_token_seconds_count 2\n"
        ),
        serving.ServerReading(running=8, waiting=0, kv_cache_percent=50, requests=2, prompt_tokens=7),
    ),
    "tgi": (
        "tgi_batch_current_size 4\ntgi_queue_size 7\ntgi_request_success 44\ntgi_request_generated_tokens_sum 81\n",
        serving.ServerReading(running=4, waiting=7, requests=44, generated_tokens=81),
    ),
    "triton": (
        (
            'nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 1\n'
            'nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 2\n'
            'nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512\n'
            'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.1\n'
        ),
        serving.ServerReading(running=2, waiting=1, kv_cache_percent=10),
    ),
}


@pytest.mark.parametrize("server", PAGES)
def test_each_server_is_read_by_its_own_names_and_what_it_lacks_is_absent(server: str) -> None:
    page, reading = PAGES[server]
    assert serving.read_server(f"# HELP x y\n{page}other 1\n") == reading


@pytest.mark.parametrize(
    "page", ["", "<html>", "up 1\n", "vllm:num_requests_running NaN\n", "vllm:num_requests_running\n"]
)
def test_a_page_of_no_server_is_said_to_be_one(page: str) -> None:
    with pytest.raises(serving.NoServerError, match="no metrics of vLLM, SGLang, TGI, Triton"):
        serving.read_server(page)


def test_the_stub_shows_what_it_reads_of_itself() -> None:
    server = LlmServer(Speed())
    for at in (0.0, 0.1, 0.2, 5.0):
        server.take(Ask(at, 100, 50))
    assert serving.read_server(server.page()) == server.reading()


def test_a_percentile_is_that_of_all_servers_together_and_of_the_window_alone() -> None:
    old = serving.Latencies(BOUNDS, (0, 0, 0, 1_000))
    quick, slow = serving.Latencies(BOUNDS, (90, 90, 90, 90)), serving.Latencies(BOUNDS, (0, 0, 10, 1_010))
    assert serving.percentile([(NONE, quick), (old, slow)], 90) == pytest.approx(0.1)
    assert serving.percentile([(NONE, quick), (old, slow)], 95) == pytest.approx(0.75)
    assert serving.percentile([(NONE, quick), (NONE, NONE)], 50) == pytest.approx(0.1 * 45 / 90)
    assert serving.percentile([(NONE, old)], 95) == 1.0  # beyond the last bound nothing more is known
    assert serving.percentile([(NONE, NONE)], 95) is None


def heard(servers: ReplicaServers, replica: str, **reading: float) -> None:
    servers.heard("e", replica, 0.0, serving.ServerReading(**reading), "")


def test_a_replica_that_is_silent_is_named_and_never_counts_as_zero() -> None:
    servers = ReplicaServers(clock := ManualClock())
    assert servers.sample("e", "waiting", [], 15.0).problem == "no replica is ready"
    heard(servers, "a", running=2, waiting=0)
    servers.heard("e", "b", 0.0, None, "cannot be reached: ConnectError")
    sample = servers.sample("e", "waiting", ["a", "b"], 15.0)
    assert (sample.values, sample.silent_count, sample.proven_empty) == ((0.0,), 1, False)
    assert sample.silence == "replica b cannot be reached: ConnectError"
    kv = servers.sample("e", "kv_cache_percent", ["a", "b"], 15.0)
    assert kv.values == ()
    assert "replica a does not report kv_cache_percent; replica b cannot" in kv.problem
    clock.advance(16.0)
    stale = servers.sample("e", "waiting", ["a"], 15.0)
    assert (stale.values, stale.problem) == ((), "replica a has not answered for 16 s")
    servers.keep("e", ["b"])
    assert "replica a has not reported yet" in servers.sample("e", "waiting", ["a"], 15.0).problem


def test_arrivals_count_what_joined_the_queue_too_and_a_server_that_begins_anew_has_no_rate() -> None:
    servers = ReplicaServers(clock := ManualClock())
    heard(servers, "a", requests=100, waiting=0)
    once = servers.sample("e", "requests_per_second", ["a"], 15.0)
    assert (once.values, once.problem) == ((), "replica a has answered only once so far")
    clock.advance(10.0)
    heard(servers, "a", requests=110, waiting=20)
    assert servers.sample("e", "requests_per_second", ["a"], 15.0).values == (3.0,)
    assert servers.by_replica("e", "waiting", 15.0) == {"a": 20.0}
    clock.advance(5.0)
    heard(servers, "a", requests=1, waiting=0)
    assert servers.sample("e", "requests_per_second", ["a"], 15.0).values == ()


def test_rates_are_those_of_the_last_half_minute() -> None:
    servers = ReplicaServers(clock := ManualClock())
    for second in range(0, 120, 5):
        heard(servers, "a", requests=10.0 * max(0, second - 60), waiting=0)
        clock.advance(5.0)
    assert servers.sample("e", "requests_per_second", ["a"], 15.0).values == (10.0,)
