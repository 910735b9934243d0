"""Any bytes are either a readable file or one clear error: never a crash, never a hang."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle_jax.checkpoint.safetensors import DTYPES, Checkpoint, CheckpointError, read_header

FUZZ = settings(
    deadline=None,
    derandomize=True,
    # One folder serves all examples: each writes the file anew.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

numbers = st.one_of(
    st.integers(-3, 40),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(),
)
entries = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from([*DTYPES, "F4", "f32"]), numbers),
            "shape": st.one_of(st.lists(numbers, max_size=4), numbers),
            "data_offsets": st.one_of(st.lists(numbers, max_size=3), numbers),
        }
    ),
    st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), numbers),
    numbers,
)
headers = st.dictionaries(
    st.one_of(st.text(max_size=5), st.just("__metadata__")), entries, max_size=4
)


def read_or_refuse(path):
    """The file's table, or the message it is refused with; anything else raised is a failure."""
    try:
        return read_header(path), None
    except CheckpointError as error:
        return None, str(error)


def verdict(folder, content: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    table, refusal = read_or_refuse(path)
    if table is None:
        assert refusal.startswith(str(path))
        return
    checkpoint = Checkpoint(folder)
    for name, info in table.items():
        assert checkpoint.read(name).shape == info.shape


def test_arbitrary_bytes(num_cases, tmp_path):
    @settings(FUZZ, max_examples=num_cases("damaged safetensors files", 1500))
    @given(content=st.binary(max_size=200))
    def check(content):
        verdict(tmp_path, content)

    check()


def test_arbitrary_headers(num_cases, tmp_path):
    """JSON like a header, at times with a wrong length or bytes missing at the end."""

    @settings(FUZZ, max_examples=num_cases("damaged safetensors files", 1500))
    @given(
        header=headers, data=st.binary(max_size=80), cut=st.integers(0, 12), grow=st.integers(-9, 9)
    )
    def check(header, data, cut, grow):
        text = json.dumps(header).encode()
        length = max(0, len(text) + (grow if cut == 1 else 0))
        content = length.to_bytes(8, "little") + text + data
        verdict(tmp_path, content[: len(content) - (cut if cut > 8 else 0)])

    check()


@pytest.mark.parametrize("length", [0, 1, 7, 2**31, 2**63, 2**64 - 1])
def test_absurd_header_lengths(tmp_path, length):
    verdict(tmp_path, length.to_bytes(8, "little") + b"{}")
