"""Which devices may have mailboxes for each other."""

from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.peer_gather import mailbox
from peagle_jax import Engine
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.devices import Devices
from peagle_jax.parallel import mailboxes
from tests import tiny


def gpus(count: int, kind: str = "NVIDIA H200", capability: str = "9.0") -> list:
    client = SimpleNamespace(platform_version="cuda 13000")
    rules = dict(platform="gpu", device_kind=kind, compute_capability=capability, core_count=132)
    return [SimpleNamespace(client=client, local_hardware_id=i, **rules) for i in range(count)]


class Links:
    """Pairs of GPUs that cannot access each other, and pairs without NVLink."""

    def __init__(self):
        self.apart, self.by_pcie = set(), set()


@pytest.fixture(autouse=True)
def links(monkeypatch) -> Links:
    made = Links()
    monkeypatch.setattr(mailboxes, "_may_access", lambda *pair: pair not in made.apart)
    monkeypatch.setattr(mailboxes, "_has_nvlink", lambda *pair: pair not in made.by_pcie)
    return made


def test_linked_gpus_have_mailboxes():
    assert mailboxes.refusal_by_default(gpus(2)) is None
    b200 = gpus(8, "NVIDIA B200", "10.0")
    assert mailboxes.refusal(b200) is None
    assert mailboxes.refusal_by_default(b200) == "messages have not run on sm_100"


def test_gpus_without_nvlink_have_none_by_default(links):
    links.by_pcie.add((0, 1))
    assert mailboxes.refusal(gpus(2)) is None
    assert "not linked by NVLink" in mailboxes.refusal_by_default(gpus(2))


def test_a_pair_without_access_is_refused_by_its_numbers(links):
    links.apart.add((2, 1))
    assert mailboxes.refusal(gpus(4)) == "GPU 2 cannot access the memory of GPU 1"
    assert mailboxes.refusal_by_default(gpus(4)) == mailboxes.refusal(gpus(4))
    with pytest.raises(ConfigError, match=r"peers: GPU 2 .* leave it at auto"):
        mailboxes.Mailboxes(gpus(4))


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        (gpus(2, "NVIDIA A100-SXM4-80GB", "8.0"), "not for NVIDIA A100-SXM4-80GB"),
        (gpus(mailbox.MOST_DEVICES + 1), "32 devices are more than 31"),
    ],
)
def test_other_gpus_are_refused(devices, why):
    assert why in mailboxes.refusal(devices)


def test_tables_are_given_out_once():
    boxes = mailboxes.Mailboxes(jax.devices("cpu")[:2])
    assert len(boxes.tables() or []) == 2
    with pytest.raises(RuntimeError, match="make others"):
        boxes.tables()


def test_an_engine_says_how_its_devices_exchange_arrays(monkeypatch):
    """By itself it writes to peers where they are GPUs that can."""
    model = tiny.target(num_heads=4, num_kv_heads=2)
    sizes = dict(num_draft=0, max_num_seqs=2, max_model_len=32, tensor_parallel=2)
    chosen = lambda **given: Engine(model, None, EngineConfig(**sizes, **given)).config.gather
    assert chosen() == "library"
    assert chosen(gather="peers") == "peers"
    monkeypatch.setattr(mailboxes, "refusal_by_default", lambda devices: None)
    assert chosen() == "peers"
    assert chosen(gather="library") == "library"
    assert Devices(1, peers=None).peers is False
