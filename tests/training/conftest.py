"""A tiny random target with a tokenizer and a chat template."""

import json
import shutil

import pytest

from peagle_jax.checkpoint import save_target
from peagle_jax.cli.model_folders import embedded
from tests import tiny

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
EOS = 0  # <|endoftext|>
VOCAB = 8192  # of the embedded model's tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The target's folder, with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny.target(vocab_size=VOCAB, num_layers=7, eos_ids=(EOS,), max_position=256)
    save_target(model, folder, dtype="float32")
    shutil.copy(embedded("target") / "tokenizer.json", folder)
    settings = json.loads((embedded("target") / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
