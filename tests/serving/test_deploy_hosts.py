"""The files of deploy/: each starts servers with options that exist, and several-hosts.yaml connects its hosts by TLS."""

from collections.abc import Iterator

import pytest
import yaml

from serving.settings import Settings
from tests.serving.test_deploy import DEPLOY, in_force, read_dockerfile

GROUP = "peagle-hosts"
LEADER = f"{GROUP}-0.{GROUP}.default"
"""$(LWS_LEADER_ADDRESS): the Pod of host 0, under the Service that LeaderWorkerSet makes, and the namespace."""
MANIFESTS = {
    "compose.yaml": 1,
    "compose.replicas.yaml": 2,
    "kubernetes.yaml": 1,
    "kubernetes-replicas.yaml": 1,
    "several-hosts.yaml": 2,
}
"""Servers by file."""


@pytest.fixture(scope="module")
def stages():
    return read_dockerfile(DEPLOY / "Dockerfile")


@pytest.fixture(scope="module")
def objects() -> dict:
    """Objects of several-hosts.yaml, by kind."""
    found = yaml.safe_load_all((DEPLOY / "several-hosts.yaml").read_text())
    return {one["kind"]: one for one in found}


@pytest.fixture(scope="module")
def pods(objects) -> list[dict]:
    """The Pods of host 0 and of the others."""
    templates = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [templates[name]["spec"] for name in ("leaderTemplate", "workerTemplate")]


@pytest.fixture(scope="module")
def hosts(objects, pods, stages) -> list[Settings]:
    """The settings of the server in each of these Pods."""
    size = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"]
    return [
        in_force(stages, of_host(pod["containers"][0]["args"], index, size))
        for index, pod in enumerate(pods)
    ]


def of_host(arguments: list[str], index: int = 0, size: int = 2) -> list[str]:
    """The arguments with the variables that LeaderWorkerSet sets."""
    variables = {"GROUP_SIZE": size, "WORKER_INDEX": index, "LEADER_ADDRESS": LEADER}
    for name, value in variables.items():
        arguments = [text.replace(f"$(LWS_{name})", str(value)) for text in arguments]
    return arguments


def servers(tree) -> Iterator[dict]:
    """Containers of Kubernetes and services of Compose that run the server's image."""
    if isinstance(tree, list):
        for one in tree:
            yield from servers(one)
    elif isinstance(tree, dict):
        build, image = tree.get("build"), str(tree.get("image", ""))
        if build["target"] == "server" if build else image.split(":")[0] == "peagle-jax":
            yield tree
        for name, one in tree.items():
            if not name.startswith("x-"):  # a part that services of Compose repeat
                yield from servers(one)


def test_every_manifest_is_known():
    found = {path.name for path in DEPLOY.glob("*.yaml")}
    assert found == set(MANIFESTS)


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_server_of_a_manifest_accepts_its_options(name, stages):
    found = list(servers(list(yaml.safe_load_all((DEPLOY / name).read_text()))))
    assert len(found) == MANIFESTS[name]
    for index, one in enumerate(found):
        arguments = one.get("args", one.get("command"))
        assert "$" not in "".join(of_host(arguments))
        in_force(stages, of_host(arguments, index))


def test_each_host_has_its_number_and_its_gpus(pods, hosts):
    assert [host.host_index for host in hosts] == [0, 1]
    for pod, host in zip(pods, hosts, strict=True):
        (container,) = pod["containers"]
        assert host.devices_per_host == container["resources"]["limits"]["nvidia.com/gpu"]
        assert ("readinessProbe" in container) == (host.host_index == 0)


def test_hosts_find_the_first_one_before_it_is_ready(objects, hosts):
    """The leader becomes ready when all hosts are connected. The Service that LeaderWorkerSet makes publishes its
    address before; it makes none if there is one of its name."""
    assert objects["LeaderWorkerSet"]["metadata"]["name"] == GROUP
    assert objects["Service"]["metadata"]["name"] != GROUP
    assert {host.coordinator for host in hosts} == {f"{LEADER}:7000"}


def test_hosts_verify_each_other_by_the_certificate_of_the_manifest(objects, pods, hosts):
    certificate = objects["Certificate"]["spec"]
    for pod, host in zip(pods, hosts, strict=True):
        (container,) = pod["containers"]
        (folder,) = (
            one["mountPath"] for one in container["volumeMounts"] if one["name"] == "certificates"
        )
        (secret,) = (one["secret"] for one in pod["volumes"] if one["name"] == "certificates")
        assert secret["secretName"] == certificate["secretName"]
        assert not secret["defaultMode"] & 0o007
        assert pod["securityContext"]["fsGroup"]  # the key is read by this group
        files = (host.hosts_tls_cert, host.hosts_tls_key, host.hosts_tls_ca)
        # The keys of a secret that cert-manager writes.
        assert files == tuple(f"{folder}/{name}" for name in ("tls.crt", "tls.key", "ca.crt"))
        assert host.coordinator.split(":")[0] in certificate["dnsNames"]
    assert set(certificate["usages"]) == {"server auth", "client auth"}


def test_only_the_group_reaches_the_ports_of_the_hosts(objects, pods, hosts):
    """The port of the coordinator and the one above it, jax's, stay within the group."""
    (container,) = pods[0]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    port = int(hosts[0].coordinator.split(":")[1])
    assert ports == {
        "grpc": hosts[0].port,
        "http": hosts[0].http_port,
        "hosts": port,
        "jax": port + 1,
    }
    group, clients = objects["NetworkPolicy"]["spec"]["ingress"]
    labels = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    selected = labels["metadata"]["labels"]
    assert group == {"from": [{"podSelector": {"matchLabels": selected}}]}
    assert [one["port"] for one in clients["ports"]] == [hosts[0].port, hosts[0].http_port]
    named = {one["port"]: one["targetPort"] for one in objects["Service"]["spec"]["ports"]}
    assert named == {hosts[0].port: "grpc", hosts[0].http_port: "http"}
