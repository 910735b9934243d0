"""Hub ids, without a network: a cached copy is used, and everything else is one clear line."""

import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from peagle_jax.checkpoint import CheckpointError, hub
from tests.convert.conftest import GOLDEN


def test_a_folder_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "llama", tmp_path / "models" / "llama")
    assert not hub.is_hub_id("models/llama")
    for text in ("models/missing/llama", "/models/llama", "./llama", "../llama", "llama"):
        assert not hub.is_hub_id(text)
    assert hub.is_hub_id("meta-llama/Llama-3.1-8B")
    assert hub.resolve("models/llama") == (hub.Path("models/llama"), "llama")


def test_a_downloaded_snapshot_is_converted_under_its_commit(cli, tmp_path, monkeypatch):
    snapshot = tmp_path / "snapshots" / "0123abc"
    shutil.copytree(GOLDEN / "llama", snapshot)
    asked = []

    def download(name, **options):
        asked.append((name, options["revision"], tuple(options["allow_patterns"])))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    code, _, err = cli("convert", "some/llama", tmp_path / "dst", "--revision", "main")
    assert (code, err) == (0, "")
    assert asked == [("some/llama", "main", hub.MODEL)]
    assert '"name":"some/llama@0123abc"' in (tmp_path / "dst" / "manifest.json").read_text()
    code, _, err = cli("plan", GOLDEN / "peagle-1", "--target", "some/llama")
    assert (code, err) == (0, "")
    assert asked[1:] == [("some/llama", None, hub.CONFIGS)]


def test_without_a_network_the_message_says_what_to_do(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    code, out, err = cli("convert", "openai/gpt-oss-of-tomorrow", tmp_path / "dst")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "openai/gpt-oss-of-tomorrow: no such folder here, and as a hub id: the hub cannot" in err
    assert "give the path of a downloaded folder" in err
    assert not (tmp_path / "dst").exists()


RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (errors.RepositoryNotFoundError("no", response=RESPONSE), "no such model"),
        (errors.GatedRepoError("no", response=RESPONSE), "licence must be accepted"),
        (errors.RevisionNotFoundError("no", response=RESPONSE), "no revision 'v9'"),
        (errors.LocalEntryNotFoundError("no"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("no"), "cannot be reached"),
        (errors.HfHubHTTPError("server error\nmore", response=RESPONSE), "failed (server error"),
        (OSError("connection reset"), "failed (connection reset)"),
    ],
)
def test_what_goes_wrong_on_the_hub_is_distinguished(error, part, monkeypatch):
    def fail(name, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        hub.resolve("some/model", "v9")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
