"""The histogram against prometheus_client's own."""

import random

import prometheus_client

from serving.metrics import Histogram


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
