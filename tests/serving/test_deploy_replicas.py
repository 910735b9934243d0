"""The files of deploy/ for several servers: every server has GPUs of its own and is known to the gateway."""

import re
import urllib.parse

import pytest
import yaml

from serving.sources import resolve
from tests.serving.test_deploy import (
    AFTER_DRAIN,
    DEPLOY,
    ROOT,
    in_force,
    published,
    read_dockerfile,
    smg_options,
)

STEADY = 30
"""Seconds after which the gateway has left out a server that does not answer."""


@pytest.fixture(scope="module")
def stages():
    return read_dockerfile(DEPLOY / "Dockerfile")


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((DEPLOY / "compose.replicas.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def servers(services):
    """The services of compose.replicas.yaml that run the image of the server."""
    is_server = lambda one: one.get("build", {}).get("target") == "server"
    return {name: one for name, one in services.items() if is_server(one)}


@pytest.fixture(scope="module")
def objects():
    """Objects of kubernetes-replicas.yaml, by kind and name."""
    found = yaml.safe_load_all((DEPLOY / "kubernetes-replicas.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


@pytest.fixture(scope="module")
def replicas(objects):
    return objects["StatefulSet", "peagle-replica"]["spec"]


@pytest.fixture(scope="module")
def gateway(objects):
    return objects["Deployment", "peagle-gateway"]["spec"]["template"]["spec"]


def check_gateway(args, addresses: set[str]) -> None:
    """The gateway has these servers, polls their health often, and retries refused requests on another one."""
    urls = [urllib.parse.urlsplit(one) for one in args.worker_urls]
    assert {one.scheme for one in urls} == {"grpc"}
    assert {one.netloc for one in urls} == addresses
    assert not args.disable_retries
    assert not args.disable_health_check
    assert args.health_failure_threshold * args.health_check_interval_secs <= STEADY
    # A retry may reach the same server again until the checks have failed.
    retries = range(args.retry_max_retries - 1)
    waits = [args.retry_initial_backoff_ms * args.retry_backoff_multiplier**i for i in retries]
    least = (1 - args.retry_jitter_factor) * sum(waits) / 1000
    checks = args.health_failure_threshold + 1
    assert least > checks * args.health_check_interval_secs + args.health_check_timeout_secs
    assert args.disable_circuit_breaker  # it would count the retries, and outlast the restart
    assert args.load_monitor_interval == 1
    assert args.policy == "cache_aware"


def test_servers_of_compose_exist(servers, stages):
    for one in servers.values():
        found = in_force(stages, one["command"])
        (device,) = one["deploy"]["resources"]["reservations"]["devices"]
        assert found.tensor_parallel == len(device["device_ids"])
        assert f"ARG {next(iter(one['build']['args']))}=" in (DEPLOY / "Dockerfile").read_text()
        minutes = one["stop_grace_period"].removesuffix("m")
        assert 60 * int(minutes) > found.drain_seconds + AFTER_DRAIN
        assert [text.split(":")[1] for text in one["volumes"]] == [stages["server"].one("VOLUME")]
        assert not published(one)  # clients reach the gateway only


def test_the_gateway_of_compose_lists_every_server(services, servers, stages):
    args = smg_options(services["gateway"]["command"])
    ports = {name: in_force(stages, one["command"]).port for name, one in servers.items()}
    check_gateway(args, {f"{name}:{port}" for name, port in ports.items()})
    healthy = {"condition": "service_healthy"}
    assert services["gateway"]["depends_on"] == dict.fromkeys(servers, healthy)
    assert published(services["gateway"]) == {args.port: ("127.0.0.1", args.port)}


def test_the_gateway_of_kubernetes_lists_every_server(objects, replicas, gateway, stages):
    (server,), (container,) = replicas["template"]["spec"]["containers"], gateway["containers"]
    args, found = smg_options(container["args"]), in_force(stages, server["args"])
    service = replicas["serviceName"]
    names = [f"peagle-replica-{i}.{service}" for i in range(replicas["replicas"])]
    check_gateway(args, {f"{name}:{found.port}" for name in names})
    checks = args.health_success_threshold * args.health_check_interval_secs
    assert replicas["minReadySeconds"] > checks  # before the next server is replaced
    headless = objects["Service", service]["spec"]
    assert headless["clusterIP"] == "None"
    assert headless["publishNotReadyAddresses"]  # the gateway still reads from one that drains
    assert headless["selector"] == replicas["selector"]["matchLabels"]
    assert replicas["template"]["metadata"]["labels"] == replicas["selector"]["matchLabels"]


def test_servers_of_kubernetes_exist_and_may_drain(replicas, stages):
    pod = replicas["template"]["spec"]
    (container,) = pod["containers"]
    found = in_force(stages, container["args"])
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"grpc": found.port, "http": found.http_port}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == found.tensor_parallel
    for name in ("startup", "liveness", "readiness"):
        assert container[f"{name}Probe"]["grpc"] == {"port": found.port}
    assert pod["terminationGracePeriodSeconds"] >= found.drain_seconds + AFTER_DRAIN
    assert pod["enableServiceLinks"] is False
    (mount,), (claim,) = container["volumeMounts"], replicas["volumeClaimTemplates"]
    assert mount == {"name": claim["metadata"]["name"], "mountPath": stages["server"].one("VOLUME")}
    user = int(stages["server"].one("USER").split(":")[0])
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (
        True,
        user,
    )


def test_the_commands_of_the_page_start_servers_and_their_gateway():
    text = (ROOT / "docs/replicas.md").read_text()
    found = re.findall(r"^CUDA_VISIBLE_DEVICES=(\S+) peagle-serve (.*)$", text, re.MULTILINE)
    ports = [resolve(options.split(), {})[0].port for _, options in found]
    assert len({gpu for gpu, _ in found}) == len(found) >= 2
    (line,) = re.findall(r"^smg launch (.*)$", text.replace("\\\n", ""), re.MULTILINE)
    check_gateway(smg_options(line.split()), {f"127.0.0.1:{port}" for port in ports})
