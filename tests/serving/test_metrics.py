"""Prometheus metrics as scrapers see them: vLLM's names, and values that move as requests run."""

import random
import re
import threading
from types import SimpleNamespace

import grpc
import httpx
import prometheus_client
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from peagle_jax import EngineConfig
from peagle_jax.engine.device import memory
from peagle_jax.engine.host import k_by_load
from peagle_jax.engine.host.round_times import RoundTimes
from serving.messages import Load, Tokens
from serving.metrics import Histogram, Metrics
from serving.protos import peagle_v1_pb2 as pb
from tests.serving.live import LiveServer
from tests.waiting import LIMIT, eventually

LABELS = {"model_name": "tiny", "engine": "0"}
BODY = dict(prompt="hello there", max_tokens=20, temperature=0, ignore_eos=True)

COUNTERS = dict.fromkeys(
    (
        *("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"),
        *("vllm:spec_decode_num_accepted_tokens", "vllm:prefix_cache_queries"),
        *("vllm:prefix_cache_hits", "vllm:prompt_tokens", "vllm:prompt_tokens_cached"),
        *("vllm:generation_tokens", "vllm:num_preemptions", "peagle:rounds"),
        *("peagle:spec_decode_num_emitted_tokens", "peagle:requests_not_finite"),
        *("peagle:num_speculative_tokens_changes", "peagle:prefix_cache_restored_rings"),
    ),
    (),
)
COUNTERS |= {
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("position",),
    "peagle:spec_decode_num_draft_tokens_per_pos": ("position",),
    "vllm:request_success": ("finished_reason",),
    "vllm:admission_rejections": ("reason",),
    "peagle:requests": ("protocol", "code"),
}
GAUGES = {
    "vllm:num_requests_running": (),
    "vllm:num_requests_waiting": (),
    "vllm:num_requests_waiting_by_reason": ("reason",),
    "vllm:kv_cache_usage_perc": (),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
    "peagle:acceptance_length": (),
    "peagle:devices": (),
    "peagle:paused": (),
    "peagle:weights_info": ("version",),
    "peagle:device_memory_bytes": ("device", "kind"),
    "peagle:open_requests": (),
    "peagle:prefix_cache_idle_pages": (),
    "peagle:num_speculative_tokens": ("batch_size",),
    "peagle:predicted_tokens_per_second": (),
}
SECONDS = (
    *("time_to_first_token", "inter_token_latency", "request_time_per_output_token"),
    *("e2e_request_latency", "request_queue_time", "request_prefill_time"),
    *("request_decode_time", "request_inference_time"),
)
HISTOGRAMS = (*(f"vllm:{name}_seconds" for name in SECONDS), "vllm:iteration_tokens_total")


def post(server: LiveServer, **changes) -> dict:
    return server.post("/v1/completions", **BODY | changes).json()


def scrape(server: LiveServer) -> dict[str, float]:
    """Values by sample name, its own labels attached: 'vllm:request_success_total{stop}'."""
    server.check_empty()
    found = {}
    text = httpx.get(f"http://{server.http_address}/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [value for name, value in sample.labels.items() if name not in LABELS]
            assert sample.labels.items() >= LABELS.items()
            found[sample.name + (f"{{{','.join(own)}}}" if own else "")] = sample.value
    return found


def moved(server: LiveServer, before: dict[str, float]) -> dict[str, float]:
    """What changed, and by how much."""
    now = scrape(server)
    changes = {name: value - before.get(name, 0) for name, value in now.items()}
    return {name: value for name, value in changes.items() if value}


def test_names_kinds_and_labels_are_vllms(server):
    post(server)
    post(server, max_tokens=1)
    answer = httpx.get(f"http://{server.http_address}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {one.name: one for one in text_string_to_metric_families(answer.text)}
    for kind, names in (("counter", COUNTERS), ("gauge", GAUGES)):
        for name, labels in names.items():
            assert families[name].type == kind
            assert families[name].documentation
            for sample in families[name].samples:
                assert sample.labels.keys() == {*LABELS, *labels}
    for name in HISTOGRAMS:
        assert families[name].type == "histogram"
        assert families[name].samples[0].labels.keys() == {*LABELS, "le"}
    created = {name for name in families if name.endswith("_created")}
    assert families.keys() - created == {*COUNTERS, *GAUGES, *HISTOGRAMS}


class ZeroIsFastest(RoundTimes):
    """Rounds without drafts take no time."""

    def untimed(self, shapes):
        return []

    def seconds(self, size, drafts):
        return {k: 1e-3 * (1 + 99 * k) for k in drafts}


@pytest.mark.slow
def test_metrics_and_stats_say_what_was_chosen_at_run_time(make_engine, monkeypatch):
    monkeypatch.setattr(k_by_load.LoadPolicy, "decide_every", 1)
    engine = make_engine(adaptive="load", max_num_seqs=1, max_waiting=1, times=ZeroIsFastest())
    server = LiveServer(engine, http=True)
    found = scrape(server)
    assert found["peagle:num_speculative_tokens{1}"] == 3
    assert found["peagle:num_speculative_tokens_changes_total"] == 0
    with server.peagle() as stub:
        stats = lambda: stub.GetStats(pb.GetStatsRequest(), timeout=LIMIT)
        eventually(lambda: not stats().batch_sizes_pending, "all programs are compiled")
        for _ in range(3):
            post(server, max_tokens=60, ignore_eos=True)
        eventually(lambda: stats().num_speculative_tokens_changes == 1)
        assert dict(stats().num_speculative_tokens_per_batch_size) == {1: 0}
        assert stats().predicted_tokens_per_second == pytest.approx(1000)
    found = scrape(server)
    assert found["peagle:num_speculative_tokens{1}"] == 0
    assert found["peagle:num_speculative_tokens_changes_total"] == 1
    assert found["peagle:predicted_tokens_per_second"] == pytest.approx(1000)
    server.close()


def test_a_health_check_is_no_request(server):
    """Also of a service that does not exist: it is refused, and no counter moves."""
    before = scrape(server)
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError, match="there is no service"):
            stub.Check(health_pb2.HealthCheckRequest(service="nothing"))
        stub.Check(health_pb2.HealthCheckRequest())
    assert moved(server, before) == {}


def test_a_request_changes_its_metrics(server):
    before = scrape(server)
    usage = post(server)["usage"]
    changes = moved(server, before)
    rounds = changes["vllm:spec_decode_num_drafts_total"]
    details = usage["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    assert changes["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert changes["vllm:generation_tokens_total"] == usage["completion_tokens"] == 20
    assert changes["vllm:request_success_total{length}"] == 1
    assert "vllm:request_success_total{stop}" not in changes
    assert changes["peagle:requests_total{OK,http}"] == 1
    assert changes["vllm:spec_decode_num_draft_tokens_total"] == 3 * rounds
    assert changes.get("vllm:spec_decode_num_accepted_tokens_total", 0) == accepted
    assert details["rejected_prediction_tokens"] == 3 * rounds - accepted
    assert changes["peagle:spec_decode_num_emitted_tokens_total"] == 20 - 1
    assert rounds + accepted - (20 - 1) in (0, 1)
    assert changes["vllm:iteration_tokens_total_sum"] == 20
    assert 2 <= changes["vllm:iteration_tokens_total_count"] <= changes["peagle:rounds_total"]
    gaps = changes["vllm:inter_token_latency_seconds_count"]
    assert gaps == changes["vllm:iteration_tokens_total_count"] - 1
    once = set(HISTOGRAMS) - {"vllm:iteration_tokens_total", "vllm:inter_token_latency_seconds"}
    assert {changes[f"{name}_count"] for name in once} == {1}


def test_the_rounds_of_one_call_share_the_time_since_the_call_before(monkeypatch):
    metrics = Metrics("tiny", config=EngineConfig(), load=Load, num_open=lambda: 0)
    clock = iter([10.0, 16.0])
    monkeypatch.setattr("serving.metrics.time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics.round([Tokens("a", [1]), Tokens("b", [2])])
    metrics.round([Tokens("a", [3, 4]), Tokens("a", [5]), Tokens("a", [6]), Tokens("b", [7])])
    values = metrics.registry.get_sample_value
    name, labels = "vllm:inter_token_latency_seconds", dict(model_name="tiny", engine="0")
    assert values(f"{name}_count", labels) == 4
    assert values(f"{name}_sum", labels) == 12.0
    assert values(f"{name}_bucket", labels | {"le": "2.5"}) == 3  # 2 seconds each


def test_every_device_that_reports_its_memory_has_samples(monkeypatch):
    stats = [dict(bytes_in_use=i, peak_bytes_in_use=10 + i, bytes_limit=20 + i) for i in range(2)]
    chips = [SimpleNamespace(memory_stats=lambda one=one: one) for one in stats]
    silent = SimpleNamespace(memory_stats=lambda: None)
    monkeypatch.setattr(memory, "first_devices", lambda count: [*chips, silent][:count])
    given = dict(config=EngineConfig(), load=Load, num_open=lambda: 0)
    metrics = Metrics("tiny", **given, memory=lambda: memory.device_memory(3))
    value = lambda device, kind: metrics.registry.get_sample_value(
        "peagle:device_memory_bytes",
        dict(model_name="tiny", engine="0", device=device, kind=kind),
    )
    assert [value("0", kind) for kind in ("used", "peak", "limit")] == [0, 10, 20]
    assert [value("1", kind) for kind in ("used", "peak", "limit")] == [1, 11, 21]
    assert value("2", "used") is None
    monkeypatch.undo()
    assert memory.device_memory(2) == {}  # a CPU does not report it


def test_latencies_add_up(server):
    before = scrape(server)
    post(server)
    changes = moved(server, before)
    total = lambda name: changes.get(f"vllm:{name}_seconds_sum", 0.0)
    inference = total("request_inference_time")
    assert inference == pytest.approx(total("request_prefill_time") + total("request_decode_time"))
    assert total("request_queue_time") + inference <= total("e2e_request_latency")
    assert total("time_to_first_token") < total("e2e_request_latency")
    each = total("request_time_per_output_token")
    assert each == pytest.approx(total("request_decode_time") / 19)
    assert total("inter_token_latency") <= total("e2e_request_latency")


def test_sequences_and_requests_are_counted_apart(server):
    before = scrape(server)
    post(server, n=3, temperature=1)
    changes = moved(server, before)
    assert changes["vllm:request_success_total{length}"] == 3
    assert changes["peagle:requests_total{OK,http}"] == 1
    assert changes["vllm:time_to_first_token_seconds_count"] == 1
    assert changes["vllm:request_decode_time_seconds_count"] == 3
    assert changes["vllm:generation_tokens_total"] == 60


def test_stops_and_refusals_are_counted_by_reason(server):
    before = scrape(server)
    token = post(server, return_token_ids=True)["choices"][0]["token_ids"][3]
    post(server, stop_token_ids=[token])
    post(server, prompt="")
    changes = moved(server, before)
    assert changes["vllm:request_success_total{length}"] == 1
    assert changes["vllm:request_success_total{stop}"] == 1
    assert changes["peagle:requests_total{OK,http}"] == 2


def test_gauges_show_what_runs_and_waits(server):
    frontend = server.frontend
    threads = [
        threading.Thread(target=post, args=(server,), kwargs=dict(prompt="a", max_tokens=80))
        for _ in range(12)
    ]
    with server.paced() as pace:
        for thread in threads:
            thread.start()
        eventually(lambda: frontend.num_open == 12)
        pace.release(3)
        eventually(lambda: (frontend.load.num_running, frontend.load.num_waiting) == (4, 8))
        text = server.call(frontend.metrics.text).decode()
    for thread in threads:
        thread.join()

    def value(name: str) -> float:
        return float(re.search(rf"^{name}\{{.*\}} (\S+)$", text, re.M)[1])

    assert value("vllm:num_requests_running") == 4
    assert value("vllm:num_requests_waiting") == 8
    assert value("vllm:num_requests_waiting_by_reason") >= 1
    assert 0 < value("vllm:kv_cache_usage_perc") <= 1
    assert value("peagle:open_requests") == 12
    after = scrape(server)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [after[f"vllm:{name}"] for name in names] == [0, 0, 0]


def test_a_full_queue_counts_as_rejection(make_engine):
    server = LiveServer(make_engine(max_waiting=1), http=True)
    before = scrape(server)
    post(server, n=16, temperature=1)  # 16 sequences do not fit into a queue of one
    changes = moved(server, before)
    assert changes["vllm:admission_rejections_total{resource_exhausted}"] == 1
    assert changes["peagle:requests_total{RESOURCE_EXHAUSTED,http}"] == 1
    server.run(server.frontend.drain(0.1))
    post(server)
    assert moved(server, before)["vllm:admission_rejections_total{unavailable}"] == 1
    server.close()


def text_of(registry: prometheus_client.CollectorRegistry) -> list[str]:
    text = prometheus_client.generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created{" not in line]


def test_a_scrape_equals_that_of_prometheus_own_histogram():
    """Values on a bound, below the first and above the last one; several at once count as often."""
    buckets, labels = (0.0005, 0.001, 0.25, 1.0, 1024), {"model_name": "a", "engine": "0"}
    theirs, ours = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    name, text = "vllm:tokens_total", "A text."
    reference = prometheus_client.Histogram(
        name, text, tuple(labels), buckets=buckets, registry=theirs
    ).labels(**labels)
    mine = Histogram(name, text, labels, buckets)
    ours.register(mine)
    assert text_of(ours) == text_of(theirs)
    rng = random.Random(0)
    for value in (*buckets, 0.0, 2000.0, *(rng.choice(buckets) * 2**-3 for _ in range(20))):
        reference.observe(value)
        mine.observe(value)
    for _ in range(4):
        reference.observe(0.5)
    mine.observe(0.5, 4)
    assert text_of(ours) == text_of(theirs)
    assert b"vllm:tokens_total_created{" in prometheus_client.generate_latest(ours)
