"""Any bytes named .gguf are either a model or one clear error: never a crash, never a hang."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle_jax.checkpoint.gguf_folder import write_folder
from peagle_jax.checkpoint.safetensors import CheckpointError
from tests.gguf_files import write_golden
from tests.gguf_tokenizers import SPACED, add_tokenizer

FUZZ = settings(
    deadline=None,
    derandomize=True,
    # One folder serves all examples: each writes the file anew.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ROWS = len(SPACED.tokens)


def model_or_refusal(path: Path) -> None:
    """Anything but a folder or a CheckpointError that names the file is a failure."""
    folder, message = path.with_name("folder"), str(path)
    try:
        write_folder(path, folder)
    except CheckpointError as error:
        message = str(error)
    assert message.startswith(str(path))
    for file in folder.glob("*"):
        file.unlink()
    assert sorted(path.parent.iterdir()) in ([path], [folder, path])
    if folder.exists():
        folder.rmdir()


@pytest.fixture
def whole(tmp_path) -> tuple[Path, bytes]:
    path = tmp_path / "model.gguf"
    write_golden("llama", path, meta=lambda w: add_tokenizer(w, SPACED), vocab_size=ROWS)
    return path, path.read_bytes()


def test_any_damage_to_the_header(whole, num_cases):
    """A length, count, kind or offset changes, or bytes change, vanish or are added."""
    path, content = whole
    end = content.rindex(b"rope_freqs.weight")
    numbers = st.sampled_from([0, 1, 2, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1])

    @settings(FUZZ, max_examples=num_cases("damaged GGUF files", 600))
    @given(
        at=st.integers(0, end),
        size=st.sampled_from([0, 1, 4, 8]),
        gone=st.integers(0, 9),
        new=numbers | st.integers(0, 2**64 - 1),
        cut=st.integers(0, 3 * len(content)),
    )
    def check(at, size, gone, new, cut):
        written = (new % 2 ** (8 * size)).to_bytes(size, "little")
        damaged = content[:at] + written + content[at + (gone if gone > 8 else size) :]
        path.write_bytes(damaged[:cut])
        model_or_refusal(path)

    check()


@pytest.mark.parametrize("number", [2**20, 2**31, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("place", ["tensors", "values", "text", "list"])
def test_absurd_counts_and_lengths(tmp_path, place, number):
    counts = {"tensors": (number, 0), "values": (0, number)}.get(place, (0, 1))
    content = b"GGUF" + struct.pack("<IQQ", 3, *counts)
    if place == "text":
        content += struct.pack("<Q", number)
    if place == "list":
        content += struct.pack("<Q1sIIQ", 1, b"a", 9, 8, number)
    path = tmp_path / "model.gguf"
    path.write_bytes(content + bytes(64))
    with pytest.raises(CheckpointError, match=r"truncated|not supported|twice|axes|no matrix"):
        write_folder(path, tmp_path / "folder")


@pytest.mark.parametrize("alignment", [0, 2**31, 2**32 - 1])
def test_absurd_alignments(tmp_path, alignment):
    path = tmp_path / "model.gguf"
    write_golden("llama", path, meta=lambda w: w.add_uint32("general.alignment", alignment))
    with pytest.raises(CheckpointError, match=r"general\.alignment \d+ is not a sensible number"):
        write_folder(path, tmp_path / "folder")
