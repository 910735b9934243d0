"""The dashboard and the alerts of deploy/ ask for metrics and labels that `/metrics` has."""

import json
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from peagle_jax import EngineConfig
from peagle_jax.engine.host.stats import Acceptance
from serving.messages import Load
from serving.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
OF_PROMETHEUS = {"up": {"job", "instance"}}
OF_TARGETS = {"job", "instance"}  # labels that Prometheus adds to every series
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """Labels of each series before any request: Prometheus must see them begin at 0."""
    positions = dict(per_position=(1, 0, 0), drafted_per_position=(1, 1, 1))
    counts = Acceptance(rounds=1, emitted=2, drafted=3, accepted=1, **positions)
    load = lambda: Load(acceptance=counts, num_draft={1: 3})
    config = EngineConfig(num_draft=3)
    metrics = Metrics("tiny", config=config, load=load, num_open=lambda: 0)
    found = dict(OF_PROMETHEUS)
    for family in text_string_to_metric_families(metrics.text().decode()):
        for ending in ENDINGS[family.type]:
            labels = {label for sample in family.samples for label in sample.labels}
            found[family.name + ending] = labels | OF_TARGETS
    return found


def panels() -> list[dict]:
    return [one for one in DASHBOARD["panels"] if one["type"] != "row"]


def expressions() -> list[tuple[str, str]]:
    """Title and PromQL of each query, with Grafana's variables replaced."""
    asked = [
        (panel["title"], target["expr"].replace("$__rate_interval", "5m"))
        for panel in panels()
        for target in panel["targets"]
    ]
    return asked + [(rule["alert"], rule["expr"]) for rule in RULES]


def parts(node: promql.Expr) -> Iterator[promql.Expr]:
    """A node of a parsed query and all nodes below it."""
    yield node
    names = ("lhs", "rhs", "expr", "vector_selector", "param")
    below = [getattr(node, name, None) for name in names]
    for child in [*below, *getattr(node, "args", ())]:
        if child is not None:
            yield from parts(child)


def used(expression: str) -> dict[str, set[str]]:
    """Labels that a query matches, by series."""
    found: dict[str, set[str]] = {}
    for node in parts(promql.parse(expression)):
        if isinstance(node, promql.VectorSelector):
            found.setdefault(node.name, set()).update(one.name for one in node.matchers.matchers)
    return found


def grouped(expression: str) -> set[str]:
    """Labels that a query groups or joins by."""
    nodes = list(parts(promql.parse(expression)))
    modifiers = [getattr(node, "modifier", None) for node in nodes]
    matchings = [getattr(one, "matching", None) for one in modifiers]
    return {label for one in [*modifiers, *matchings] for label in getattr(one, "labels", ())}


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_queries_name_series_and_labels_of_the_server(title, expression, series):
    asked = used(expression)
    assert asked
    for name, labels in asked.items():
        assert name in series, f"{title}: /metrics has no {name}"
        assert labels <= series[name], f"{title}: {name} has no label {labels - series[name]}"
    known = set().union(*(series[name] for name in asked))
    assert grouped(expression) <= known, title
