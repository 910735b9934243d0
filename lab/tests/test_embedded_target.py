"""Training of the embedded target: the penalty on its repeats, and the commands in their order."""

import asyncio
import email
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.embedded import target
from lab.embedded.__main__ import main
from peagle_jax.models import build
from peagle_jax.training.__main__ import main as train
from peagle_jax.training.curves import Curves
from peagle_jax.training.stored_text import Text
from peagle_jax.training.trainer import split_model
from tests import tiny

LOOP = list(range(20, 29))  # nine tokens
SOURCES = [str(Path(package.__file__).parent) for package in (asyncio, email)]
SHAPE = "--hidden-size 48 --layers 8 --heads 2 --kv-heads 1 --head-dim 24 --intermediate-size 96"


@pytest.fixture
def text() -> Text:
    """Two texts of 32 tokens: a loop of nine after a prompt of three, and one without repeats."""
    loop = [5, 6, 7, *(LOOP * 4)][:32]
    tokens = np.array([loop, range(30, 62)], np.int32)
    return Text(tokens, np.array([3, 3], np.int32), np.array([32, 32], np.int32))


def test_a_repeat_is_a_written_token_that_ends_eight_seen_ones(text):
    # The loop's second turn starts at 12; its eighth token is the first to end a repeat.
    first, second = np.asarray(target.written_repeats(jax.tree.map(jnp.asarray, text)))
    np.testing.assert_array_equal(np.flatnonzero(first), range(19, 32))
    assert not second.any()
    given = text._replace(prompt=np.array([25, 3]), length=np.array([30, 32]))
    first, _ = np.asarray(target.written_repeats(jax.tree.map(jnp.asarray, given)))
    np.testing.assert_array_equal(np.flatnonzero(first), range(25, 30))
    packed = text._replace(answer=np.arange(32) >= np.array([[28], [3]]))
    first, _ = np.asarray(target.written_repeats(jax.tree.map(jnp.asarray, packed)))
    np.testing.assert_array_equal(np.flatnonzero(first), range(28, 32))


def test_the_loss_adds_the_penalty_of_each_repeat(text, monkeypatch):
    monkeypatch.setattr(target, "LEAST_LIKELY", 0.0)  # a random model finds nothing likely
    model = build(tiny.TARGET, dtype=jnp.float32, rngs=tiny.nnx.Rngs(0))
    params, merge = split_model(model)
    options = target.TargetOptions(
        data=Path(), sequence=8, batch=2, dtype="float32", loss_chunk=16, penalty=2.0
    )
    stream, starts = jnp.arange(40, dtype=jnp.uint16) % 60, np.array([0, 9], np.int32)
    loss = lambda text: target.lm_loss(
        merge, options, params, stream, target.Batch(starts, text), None
    )
    (with_text, _), (without, _) = loss(text), loss(None)
    positions = jnp.broadcast_to(jnp.arange(32), (2, 32))
    hidden, _, _ = model(
        jnp.asarray(text.tokens),
        positions,
        [None] * model.config.num_layers,
        tiny.causal_attention,
    )
    probs = jax.nn.softmax(model.unembed(hidden))
    want = -sum(np.log(1 - float(probs[0, i - 1, text.tokens[0, i]])) for i in range(19, 32))
    np.testing.assert_allclose(with_text - without, 2 * want, rtol=1e-3)


@pytest.mark.slow
def test_source_becomes_a_target_and_its_head(tmp_path):
    data, out, head = (str(tmp_path / name) for name in ("data", "target", "head"))
    line = f"data {' '.join(SOURCES)} --out {data} --vocab-size 512 --num-prompts 60 --exercises 40"
    assert main(line.split()) == 0
    line = f"target --data {data} --out {out} {SHAPE} --sequence 48 --batch 8 --steps 60 "
    run = "--warmup 5 --every 20 --dtype float32"
    assert main((line + run).split()) == 0
    curves = Curves(Path(out) / "eval.csv")
    curves.resume(60)
    losses = [row["loss"] for row in curves.rows]
    assert losses[-1] < 0.95 * losses[0]
    prompts = f"--target {out}/final --prompts {data}/prompts.jsonl --length 64 --max-tokens 24"
    line = f"head {prompts} --no-chat --temperatures 0 --answers-only --out {head}"
    assert train(line.split()) == 0
    line = f"target --data {data} --init {out}/final --text {head}/text --text-batch 2 --steps 2 "
    line += f"--out {out}-further --sequence 48 --batch 8 {run}"
    assert main(line.split()) == 0
    config = json.loads((tmp_path / "target-further" / "final" / "config.json").read_text())
    assert config["hidden_size"] == 48


def test_a_mistake_is_one_line(tmp_path, capsys):
    assert main(["target", "--data", str(tmp_path), "--out", "x", "--steps", "1"]) == 2
    message = f"--data {tmp_path}: no tokenizer.json; give a folder that `data` wrote"
    assert capsys.readouterr().err == f"lab.embedded: error: {message}\n"
