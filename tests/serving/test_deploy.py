"""The files of deploy/ hold together: with each other, with the settings, with the gateway's options."""

import argparse
import io
import json
import re
import urllib.parse
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
KNOWN = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "ONBUILD",
    "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


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
        assert name in KNOWN, f"{name} is no instruction: {line}"
        if name == "FROM":
            image, _, stage = text.partition(" AS ")
            current = stages[stage] = Stage(image, [])
        else:
            current.instructions.append((name, " ".join(text.split())))
    return stages


@pytest.fixture(scope="module")
def stages():
    return read_dockerfile(DEPLOY / "Dockerfile")


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def objects():
    """Objects of kubernetes.yaml, by kind."""
    return {
        one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    }


@pytest.fixture(scope="module")
def pod(objects):
    return objects["Deployment"]["spec"]["template"]["spec"]


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
    scripts = re.search(
        r"\[project\.scripts\](.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.S
    )
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


def test_compose_starts_servers_that_exist(services, stages):
    found = in_force(stages, services["peagle"]["command"])
    assert set(published(services["peagle"])) == {found.port, found.http_port}
    for service in services.values():
        assert {address for address, _ in published(service).values()} == {"127.0.0.1"}
        if "build" in service:
            assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()
            assert service["build"]["target"] in stages
        else:
            assert re.fullmatch(r"[\w./-]+:v?[0-9.]+", service["image"])  # a version, not latest
    minutes = services["peagle"]["stop_grace_period"]
    assert 60 * int(minutes.removesuffix("m")) > found.drain_seconds + AFTER_DRAIN
    mounts = [text.split(":") for text in services["peagle"]["volumes"]]
    assert mounts == [["cache", stages["server"].one("VOLUME")]]


def test_compose_shows_the_gateway_the_servers(services, stages):
    args = smg_options(services["gateway"]["command"])
    (url,) = [urllib.parse.urlsplit(one) for one in args.worker_urls]
    assert (url.scheme, url.hostname) == ("grpc", "peagle")
    assert url.port == in_force(stages, services[url.hostname]["command"]).port
    assert set(published(services["gateway"])) == {args.port}
    assert stages["gateway"].ports == {args.port, args.prometheus_port}
    assert services["gateway"]["depends_on"] == {"peagle": {"condition": "service_healthy"}}


def test_prometheus_scrapes_what_runs(services, stages):
    content = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in content["scrape_configs"]}
    assert jobs.keys() == {"peagle", "gateway"}
    (servers,), (gateways,) = jobs["peagle"]["dns_sd_configs"], jobs["gateway"]["static_configs"]
    found = in_force(stages, services["peagle"]["command"])
    assert (servers["names"], servers["type"]) == (["peagle"], "A")
    assert servers["port"] == found.http_port
    gateway = smg_options(services["gateway"]["command"])
    assert gateways["targets"] == [f"gateway:{gateway.prometheus_port}"]
    mounts = [one.split(":") for one in services["prometheus"]["volumes"]]
    assert content["rule_files"] == [Path(place).name for _, place, _ in mounts[1:]]
    assert all((DEPLOY / source).is_file() for source, _, _ in mounts)


def test_kubernetes_starts_a_server_that_exists(pod, objects, stages):
    (container,) = pod["containers"]
    found = in_force(stages, container["args"])
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"grpc": found.port, "http": found.http_port}
    service = objects["Service"]["spec"]
    assert {one["name"]: one["port"] for one in service["ports"]} == ports
    assert all(one["targetPort"] == one["name"] for one in service["ports"])
    template = objects["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert service["selector"] == objects["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(found.http_port)
    user = int(stages["server"].one("USER").split(":")[0])
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (
        True,
        user,
    )
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == stages["server"].one("VOLUME")
    assert [volume["name"] for volume in pod["volumes"]] == [mount["name"]]


def test_kubernetes_probes_the_port_of_grpc(pod, stages):
    (container,) = pod["containers"]
    found = in_force(stages, container["args"])
    assert found.tls_cert is None  # probes of the kind grpc speak no TLS
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    assert all(probe["grpc"] == {"port": found.port} for probe in probes.values())
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 600


def test_kubernetes_waits_for_the_drain(pod, stages):
    """preStop and the drain both count against the grace period; then the last round, the last messages."""
    (container,) = pod["containers"]
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    drain = in_force(stages, container["args"]).drain_seconds
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + drain + AFTER_DRAIN
    assert f"the drain, and {AFTER_DRAIN:g} seconds" in (ROOT / "docs/serving.md").read_text()
