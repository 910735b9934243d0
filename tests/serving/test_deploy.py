"""The files of deploy/ fit each other, the settings and the gateway's options."""

import argparse
import io
import json
import re
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from serving import app
from serving.client.options import parser as client_parser
from serving.settings import Settings
from serving.sources import resolve

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
AFTER_DRAIN = app.END_SECONDS
STEADY = 30
"""Seconds after which a gateway has left out a server that does not answer."""
KNOWN = (
    "ADD ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM HEALTHCHECK LABEL ONBUILD RUN SHELL STOPSIGNAL "
    "USER VOLUME WORKDIR"
)
"""Instructions of a Dockerfile."""


@dataclass(frozen=True)
class Stage:
    """A stage of a Dockerfile: its instructions in order."""

    image: str
    instructions: list[tuple[str, str]]

    def all(self, name: str) -> list[str]:
        return [text for instruction, text in self.instructions if instruction == name]

    def one(self, name: str) -> str:
        (text,) = self.all(name)
        return text

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for text in self.all("ENV") for pair in text.split())

    @property
    def ports(self) -> set[int]:
        return {int(port) for text in self.all("EXPOSE") for port in text.split()}


def read_dockerfile(path: Path) -> dict[str, Stage]:
    """Stages by name; fails on what is no instruction."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    stages: dict[str, Stage] = {}
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        name, _, text = line.strip().partition(" ")
        assert name in KNOWN.split(), f"{name} is no instruction: {line}"
        if name == "FROM":
            image, _, stage = text.partition(" AS ")
            current = stages[stage] = Stage(image, [])
        else:
            current.instructions.append((name, " ".join(text.split())))
    return stages


@pytest.fixture(scope="module")
def stages():
    return read_dockerfile(DEPLOY / "Dockerfile")


def loaded(name: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def services(name: str) -> dict[str, dict]:
    """The services of a compose file."""
    return loaded(name)[0]["services"]


def servers(name: str) -> dict[str, dict]:
    """Those that run the image of the server."""
    is_server = lambda one: one.get("build", {}).get("target") == "server"
    return {key: one for key, one in services(name).items() if is_server(one)}


def objects(name: str) -> dict[tuple[str, str], dict]:
    """`spec` of each object of a Kubernetes file, by kind and name."""
    return {(one["kind"], one["metadata"]["name"]): one["spec"] for one in loaded(name)}


def in_force(stages, arguments: list[str]) -> Settings:
    """The settings of the server in the image; fails if an option or a variable does not exist."""
    found, _ = resolve(arguments, stages["server"].environment)
    return found


def test_the_image_runs_the_server_as_an_unprivileged_user(stages):
    server = stages["server"]
    assert server.image == "python:3.12-slim"
    names = [name for name, _ in server.instructions]
    last_run = len(names) - 1 - names[::-1].index("RUN")
    assert last_run < names.index("USER") < names.index("ENTRYPOINT")
    user, group = map(int, server.one("USER").split(":"))
    assert min(user, group) > 0
    assert f"--uid {user}" in " ".join(server.all("RUN"))
    project = (ROOT / "pyproject.toml").read_text()
    scripts = re.search(r"\[project\.scripts\](.*?)\n\[", project, re.S)
    assert json.loads(server.one("ENTRYPOINT")) == ["peagle-serve"]
    assert "\npeagle-serve = " in scripts[1]
    assert "\npeagle-client = " in scripts[1]


def test_the_image_listens_where_it_says(stages):
    found = in_force(stages, [])
    assert found.host == "0.0.0.0"
    assert stages["server"].ports == {found.port, found.http_port}


def test_the_image_holds_all_that_is_installed(stages):
    copies = [text.split() for text in stages["server"].all("COPY")]
    sources = [source for *many, _ in copies for source in many]
    for source in sources:
        assert (ROOT / source).exists(), source
    packages = re.search(r"include = (\[.*\])", (ROOT / "pyproject.toml").read_text())
    wanted = {name.rstrip("*") for name in json.loads(packages[1])}
    assert wanted | {"pyproject.toml", "README.md", "LICENSE"} == set(sources)
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert {f"!{source}" for source in sources} <= set(kept)


def test_the_image_is_healthy_when_the_server_serves(stages):
    options, _, command = stages["server"].one("HEALTHCHECK").partition(" CMD ")
    program, *arguments = json.loads(command)
    assert program == "peagle-client"
    args = client_parser().parse_args(arguments)
    assert args.health
    assert args.address == f"127.0.0.1:{in_force(stages, []).port}"
    given = dict(option[2:].split("=") for option in options.split())
    assert float(given["timeout"].rstrip("s")) > 5  # the client gives up by itself after 5 s
    assert given["start-period"].endswith("m")


def test_the_gateway_is_the_tested_one(stages):
    pinned = re.search(r'"(smg==[0-9.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f" {pinned} " in stages["gateway"].one("RUN") + " "
    assert json.loads(stages["gateway"].one("ENTRYPOINT")) == ["smg", "launch"]


def smg_options(arguments: list[str]):
    """As the gateway's own parser takes them."""
    from smg.router_args import RouterArgs

    made = argparse.ArgumentParser(allow_abbrev=False)
    RouterArgs.add_cli_args(made)
    with redirect_stderr(io.StringIO()) as errors:
        try:
            return made.parse_args(arguments)
        except SystemExit:
            pytest.fail(errors.getvalue())


def published(service: dict) -> dict[int, tuple[str, int]]:
    """Container's port -> address and port of the host."""
    found = {}
    for text in service.get("ports", ()):
        address, outside, inside = text.split(":")
        found[int(inside)] = (address, int(outside))
    return found


HEALTHY = {"condition": "service_healthy"}
COMPOSE = ("compose.yaml", "compose.replicas.yaml")


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_starts_servers_that_exist(name, stages):
    gpus = []
    for one in servers(name).values():
        found = in_force(stages, one["command"])
        assert (DEPLOY / one["build"]["context"]).resolve() == ROOT
        minutes = one["stop_grace_period"].removesuffix("m")
        assert 60 * int(minutes) > found.drain_seconds + AFTER_DRAIN
        assert [text.split(":") for text in one["volumes"]] == [
            ["cache", stages["server"].one("VOLUME")]
        ]
        if name == "compose.yaml":
            assert set(published(one)) == {found.port, found.http_port}
            continue
        assert not published(one)  # clients reach the gateway only
        (device,) = one["deploy"]["resources"]["reservations"]["devices"]
        assert found.tensor_parallel == len(device["device_ids"])
        gpus += device["device_ids"]
    assert len(set(gpus)) == len(gpus) >= (name == "compose.replicas.yaml") * 2
    for one in services(name).values():
        assert {address for address, _ in published(one).values()} <= {"127.0.0.1"}
        if "build" in one:
            assert (ROOT / one["build"]["dockerfile"]).is_file()
            assert one["build"]["target"] in stages
        else:
            assert re.fullmatch(r"[\w./-]+:v?[0-9.]+", one["image"])  # a version, not latest


@pytest.mark.parametrize("name", COMPOSE)
def test_the_gateway_of_compose_lists_every_server(name, stages):
    gateway = services(name)["gateway"]
    args = smg_options(gateway["command"])
    ports = {key: in_force(stages, one["command"]).port for key, one in servers(name).items()}
    assert args.worker_urls == [f"grpc://{key}:{port}" for key, port in ports.items()]
    assert set(published(gateway)) == {args.port}
    assert stages["gateway"].ports == {args.port, args.prometheus_port}
    assert gateway["depends_on"] == dict.fromkeys(ports, HEALTHY)
    if len(ports) > 1:
        check_balance(args)


@pytest.mark.parametrize("name", COMPOSE)
def test_prometheus_scrapes_what_runs(name, stages):
    content, all_services = loaded("prometheus.yml")[0], services(name)
    jobs = {job["job_name"]: job for job in content["scrape_configs"]}
    (found,), (gateways,) = jobs["peagle"]["dns_sd_configs"], jobs["gateway"]["static_configs"]
    assert (found["names"], found["type"]) == (["peagle"], "A")
    for key, one in servers(name).items():
        assert found["port"] == in_force(stages, one["command"]).http_port
        assert found["names"] == (
            [key] if name == "compose.yaml" else one["networks"]["default"]["aliases"]
        )
    gateway = smg_options(all_services["gateway"]["command"])
    assert gateways["targets"] == [f"gateway:{gateway.prometheus_port}"]
    mounts = [one.split(":") for one in all_services["prometheus"]["volumes"]]
    assert content["rule_files"] == [Path(place).name for _, place, _ in mounts[1:]]
    assert all((DEPLOY / source).is_file() for source, _, _ in mounts)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("kubernetes.yaml", ("Deployment", "peagle")),
        ("kubernetes-replicas.yaml", ("StatefulSet", "peagle-replica")),
    ],
)
def test_servers_of_kubernetes_exist_and_may_drain(name, key, stages):
    """preStop and the drain both count against the grace period; then the last round."""
    all_objects = objects(name)
    owner = all_objects[key]
    template = owner["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    found = in_force(stages, container["args"])
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"grpc": found.port, "http": found.http_port}
    service = all_objects["Service", key[1]]
    assert all(one["port"] == ports[one["name"]] for one in service["ports"])
    labels = template["metadata"]["labels"]
    assert service["selector"] == owner["selector"]["matchLabels"] == labels
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(found.http_port)
    assert found.tls_cert is None  # probes of the kind grpc speak no TLS
    probes = {one: container[f"{one}Probe"] for one in ("startup", "liveness", "readiness")}
    assert all(probe["grpc"] == {"port": found.port} for probe in probes.values())
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 600
    hook = container.get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}})
    sleep, seconds = hook["exec"]["command"]
    assert sleep == "sleep"
    grace = pod["terminationGracePeriodSeconds"]
    assert grace >= int(seconds) + found.drain_seconds + AFTER_DRAIN
    user = int(stages["server"].one("USER").split(":")[0])
    context = pod["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"]) == (True, user)
    # Kubernetes would set variables whose names begin with our prefix, which the server refuses.
    assert pod["enableServiceLinks"] is False
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == stages["server"].one("VOLUME")
    claims = [one["metadata"] for one in owner.get("volumeClaimTemplates", ())]
    assert [one["name"] for one in (pod.get("volumes") or claims)] == [mount["name"]]
    limits = container["resources"].get("limits", {})
    assert limits.get("nvidia.com/gpu", 1) == found.tensor_parallel


def test_the_gateway_of_kubernetes_lists_every_server(stages):
    all_objects = objects("kubernetes-replicas.yaml")
    owner = all_objects["StatefulSet", "peagle-replica"]
    gateway = all_objects["Deployment", "peagle-gateway"]["template"]["spec"]
    (server,), (container,) = owner["template"]["spec"]["containers"], gateway["containers"]
    args, found = smg_options(container["args"]), in_force(stages, server["args"])
    service = owner["serviceName"]
    names = [f"peagle-replica-{i}.{service}" for i in range(owner["replicas"])]
    assert args.worker_urls == [f"grpc://{name}:{found.port}" for name in names]
    check_balance(args)
    checks = args.health_success_threshold * args.health_check_interval_secs
    assert owner["minReadySeconds"] > checks  # before the next server is replaced
    headless = all_objects["Service", service]
    assert headless["clusterIP"] == "None"
    assert headless["publishNotReadyAddresses"]  # the gateway still reads from one that drains
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"http": args.port, "metrics": args.prometheus_port}
    assert gateway["terminationGracePeriodSeconds"] > args.shutdown_grace_period_secs


def check_balance(args) -> None:
    """The gateway polls its servers' health often, and retries refused requests on another one."""
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
