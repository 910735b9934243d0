"""Any change to a config.json ends in a config or in one clear error: never in another
exception.
"""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle_jax.checkpoint import Checkpoint, CheckpointError, target_config
from peagle_jax.checkpoint.head_json import drafter_config
from tests.checkpoint import released

GOLDEN = Path(__file__).parents[1] / "golden"
FUZZ = settings(
    deadline=None,
    derandomize=True,
    # One folder serves all examples: each writes the files anew.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 70), max_size=3),
    st.builds(dict),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", "x"]), max_size=3),
    st.dictionaries(
        st.sampled_from(["rope_theta", "rope_type", "factor", "0", "5"]),
        st.one_of(
            st.none(),
            st.integers(-2, 600),
            st.floats(),
            st.text(max_size=3),
            st.builds(dict, head_dim=st.integers(-1, 9)),
        ),
        max_size=3,
    ),
)


def changed(config: dict, draw) -> dict:
    """A copy with one to three values replaced, at any depth."""
    config = json.loads(json.dumps(config))
    for _ in range(draw(st.integers(1, 3))):
        inner = config
        while True:
            key = draw(st.sampled_from(sorted(inner)))
            if not (isinstance(inner[key], dict) and inner[key] and draw(st.booleans())):
                break
            inner = inner[key]
        inner[key] = draw(values)
    return config


def read_or_refuse(read, where: Path) -> None:
    """Anything but a CheckpointError that names the folder is a failure."""
    message = None
    try:
        read()
    except CheckpointError as error:
        message = str(error)
    assert message is None or message.startswith(str(where))


TARGETS = [
    "llama-3.1-8b",
    "mistral-7b-v0.1",
    "qwen2.5-7b",
    "qwen3-8b",
    "qwen3-coder-30b-a3b",
    "gpt-oss-20b",
    "gemma-4-31b",
]


@pytest.mark.parametrize("name", TARGETS)
def test_targets(name, tmp_path, num_cases):
    config, generation = released.CONFIGS[name]

    @settings(FUZZ, max_examples=num_cases("damaged config.json files", 400))
    @given(st.data())
    def check(data):
        which = data.draw(st.booleans())
        new = changed(config, data.draw) if which else config
        new_generation = generation if which or not generation else changed(generation, data.draw)
        released.write_config(tmp_path, new, new_generation)
        read_or_refuse(lambda: target_config(tmp_path), tmp_path)

    check()


@pytest.mark.parametrize("name", ["peagle-1", "eagle3", "aws"])
def test_heads(name, tmp_path, num_cases):
    if name == "aws":
        config, tensors = released.AWS_GPT_OSS_20B_HEAD, set(released.aws_gpt_oss_20b_head())
        target = target_config(released.write_config(tmp_path, *released.CONFIGS["gpt-oss-20b"]))
        width = 8640
    else:
        config = json.loads((GOLDEN / name / "config.json").read_text())
        tensors, target = set(Checkpoint(GOLDEN / name).names()), target_config(GOLDEN / "qwen3")
        width = 192
    config = config | {"eagle_config": {}, "num_speculative_tokens": None, "logit_scale": 1.0}

    @settings(FUZZ, max_examples=num_cases("damaged config.json files", 400))
    @given(st.data())
    def check(data):
        released.write_config(tmp_path, changed(config, data.draw))
        read_or_refuse(lambda: drafter_config(tmp_path, target, tensors, width), tmp_path)

    check()
