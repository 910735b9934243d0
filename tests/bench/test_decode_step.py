"""Decode rounds of presets: weights of every format, and the rows of a run."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench import decode_step, presets
from bench.__main__ import main
from bench.cells import Variant, cells_config
from bench.decode_step import Options, groups, variants
from bench.presets import preset, with_layers
from bench.random_weights import random_head, random_target
from pallas_kernels.formats import dequantize, kind
from peagle_jax.config import ConfigError, EngineConfig, ExpertsConfig
from peagle_jax.models.layers import INIT_STD
from tests import tiny

MOE = replace(
    tiny.TARGET, **tiny.FAMILIES["gpt_oss"], hidden_size=64, intermediate_size=96, vocab_size=256
)
DENSE = replace(tiny.TARGET, num_layers=4, hidden_size=160, intermediate_size=256, vocab_size=256)
WIDTHS = dict(hidden_size=160, intermediate_size=64, vocab_size=256)
MIXED = replace(tiny.TARGET, **tiny.VARIANTS["qwen3_moe with dense layers"], **WIDTHS)


def matrices(module) -> dict:
    """path -> (values, scale) of every matrix."""
    flat = {path: leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(module))}
    return {
        path[:-1]: (leaf, flat.get((*path[:-1], "scale")))
        for path, leaf in flat.items()
        if path[-1] == "weight" and leaf.ndim > 1
    }


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize(
    ("form", "config"), [("bf16", DENSE), ("fp8", DENSE), ("fp8", MIXED), ("mxfp4", MOE)]
)
def test_random_weights_have_the_form_and_the_spread_of_a_real_model(form, config):
    target = random_target(config, form, dtype="bfloat16")
    found = matrices(target)
    quantised = set()
    for path, (values, scale) in found.items():
        name = kind(values, scale)
        quantised |= {path[-1]} if name != "plain" else set()
        wanted = INIT_STD
        if path[-1] in ("out", "down"):
            wanted /= np.sqrt(2 * config.num_layers)
        elif path[-1] == "embed" and not config.tie_embeddings:
            wanted = 1.0
        spread = np.asarray(dequantize(values, scale, jnp.float32)).std()
        # A scale is up to 10 % off, and these matrices have few scales; the router has few weights.
        assert spread == pytest.approx(wanted, rel=0.12), (path, name)
    experts = {"gate_up", "down"}
    of_form = {"bf16": set(), "fp8": experts | {"qkv", "out"}, "mxfp4": experts}
    assert quantised == of_form[form]
    assert float(target.norm.weight[...].min()) == float(target.norm.weight[...].max()) == 1.0
    assert not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(target))


def test_weights_do_not_repeat_and_follow_the_seed():
    one, again, other = (random_target(DENSE, "fp8", dtype="float32", seed=s) for s in (0, 0, 1))
    first, second = one.layers[0].mlp.down, one.layers[1].mlp.down
    same = lambda a, b: np.array_equal(np.asarray(a.weight[...]), np.asarray(b.weight[...]))
    assert same(first, again.layers[0].mlp.down)
    assert not same(first, second)
    assert not same(first, other.layers[0].mlp.down)


def test_draft_tokens_of_a_pruned_head_are_spread_over_the_vocabulary():
    head = random_head(tiny.head(draft_vocab_size=50).config, dtype="float32")
    ids = np.asarray(head.to_target_ids(jnp.arange(50)))
    assert ids.tolist() == [i * 128 // 50 for i in range(50)]


def test_presets_know_their_formats_heads_and_layers():
    coder = preset("qwen3-coder-30b-a3b-fp8")
    assert (coder.format, preset("gpt-oss-120b").format) == ("fp8", "mxfp4")
    assert preset("llama-3.1-8b").weights == "bfloat16"
    parallel, eagle = coder.head("peagle"), coder.head("eagle3")
    assert (parallel.num_layers, parallel.draft_vocab_size) == (4, 151936)
    assert (eagle.num_layers, eagle.draft_vocab_size) == (1, 32000)
    assert parallel.taps == (2, 24, 45)
    short = preset("gpt-oss-20b", layers=2)
    assert short.target.sliding_windows == (128, None)
    assert "2 of 24 layers" in short.name
    assert max(short.head("peagle").taps) <= 2
    for name in presets.names():
        for method in ("eagle3", "peagle"):
            preset(name).head(method)
    with pytest.raises(ConfigError, match=r"unknown preset .* known are .*gpt-oss-20b"):
        preset("gpt-oss-20b-fp8")
    with pytest.raises(ConfigError, match="has 24"):
        preset("gpt-oss-20b", layers=25)


def test_a_shortened_model_keeps_the_dense_layers_that_are_left():
    config = replace(MIXED, experts=replace(MIXED.experts, dense_layers=(1, 2)))
    assert with_layers(config, 2).experts.dense_layers == (1,)
    assert with_layers(config, 1).experts == ExpertsConfig(num_experts=6, top_k=2)
    assert with_layers(config, 3) == config


def test_a_choice_by_load_is_a_variant_of_its_own():
    of = lambda **fields: variants(Options(preset="tiny", k=(3, 7), **fields))
    assert of(method=("none", "peagle"), adaptive=("off", "load")) == [
        Variant("none", 0),
        *(Variant("peagle", k, adaptive) for k in (3, 7) for adaptive in ("off", "load")),
    ]
    with pytest.raises(ConfigError, match="--adaptive needs a method"):
        variants(Options(preset="tiny", method=("none",), adaptive=("load",)))


@pytest.fixture
def tiny_presets(monkeypatch):
    """ "tiny", "tiny-fp8" and, in MXFP4, "tiny-moe"."""
    moe = tiny.FAMILIES["gpt_oss"] | {"sliding_windows": (None, 6, None)}
    wide = dict(hidden_size=64, intermediate_size=64)
    monkeypatch.setitem(presets.PRESETS, "tiny", replace(tiny.TARGET, **wide))
    monkeypatch.setitem(presets.PRESETS, "tiny-moe", replace(tiny.TARGET, **moe, **wide))
    monkeypatch.setattr(presets, "PEAGLE_LAYERS", 1)
    one_bucket = property(lambda config: (config.max_num_seqs,))
    monkeypatch.setattr(EngineConfig, "batch_buckets", one_bucket)


TINY = ["--layers", "1", "--prefill-chunk", "16", "--prompt-tokens", "20"]


@pytest.mark.slow
def test_decode_step_measures_every_cell(tiny_presets, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    argv = [
        *("--preset", "tiny-fp8", *TINY, "--out", str(out), "--no-cache", "--sha", "abc"),
        *("-K", "3", "--method", "none", "peagle"),
    ]
    argv += ["--concurrency", "3", "--max-tokens", "24"]
    argv += ["--synthetic-acceptance-length", "2.5", "--prefill-rows", "1"]
    assert main(["decode-step", *argv]) == 0
    measured = [json.loads(line) for line in out.read_text().splitlines()]
    cells = [(row["method"], row["num_speculative_tokens"], row["concurrency"]) for row in measured]
    methods = (("none", 0), ("peagle", 3))
    assert cells == [(method, k, 3) for method, k in methods]
    for row in measured:
        assert row["kind"] == "decode-step"
        assert row["model"] == "tiny-fp8 (1 of 3 layers)"
        assert (row["weights"], row["sha"], row["layers"]) == ("fp8", "abc", 1)
        assert row["tokens"] == 24 * row["concurrency"]
        assert row["timed_rounds"] > 0
        # Rounds of a full batch have the tokens of the whole run, give or take those of its end.
        full = row["full_tokens_per_second"] * row["ms_per_round_mean"] / 1e3
        assert full == pytest.approx(3 * row["acceptance_length"], rel=0.3)
        assert 0 < row["ms_per_round"] < 1e3 * row["seconds"]
        assert row["prefill_tokens_per_second"] > 0
        assert row["preemptions"] == 0
    drafted = [row for row in measured if row["method"] != "none"]
    assert all(1.8 < row["acceptance_length"] < 3.2 for row in drafted)
    assert "P-EAGLE" in capsys.readouterr().out


def test_rounds_of_other_work_are_rows_of_a_kind_of_their_own():
    of = lambda **fields: decode_step.kind(Options(preset="tiny", **fields))
    assert of() == "decode-step"
    assert of(adaptive=("off", "load")) == "adaptive-step"
    assert of(tensor_parallel=2) == "parallel-step"


def test_an_engine_compiles_only_the_batch_sizes_of_its_cells():
    sizes = dict(num_draft=3, max_num_seqs=32, page_size=64, prefill_rows=8)
    config = cells_config((32, 8), **sizes)
    assert config.batch_buckets == replace(config, num_pages=700).batch_buckets == (8, 32)
    given = dict(preset="tiny", prefill_rows=8, concurrency=(1, 8, 32, 128))
    assert groups(Options(**given)) == [(1,), (8, 32, 128)]


def test_a_flag_that_is_removed_is_refused_with_the_reason(capsys):
    with pytest.raises(SystemExit):
        main(["decode-step", "--rows", "1,2", "3"])
    assert "--rows is removed: ragged rounds did not beat" in capsys.readouterr().err


def test_messages_name_a_variant_as_rows_do():
    assert str(Variant("peagle", 7, "load")) == "peagle K=7 by load"


@pytest.mark.slow
def test_cells_that_do_not_fit_are_skipped(tiny_presets, tmp_path, monkeypatch, capsys):
    make = decode_step.engine_of

    def engine_of(models, options, variant, concurrencies):
        if max(concurrencies) > 2:
            raise ConfigError("not enough memory for the KV cache")
        return make(models, options, variant, concurrencies)

    monkeypatch.setattr(decode_step, "engine_of", engine_of)
    out = tmp_path / "rows.jsonl"
    argv = ["--preset", "tiny-moe", *TINY, "--out", str(out), "--no-cache", "--prefill-rows", "1"]
    argv += ["--method", "none", "--concurrency", "2", "4", "--max-tokens", "12"]
    assert main(["decode-step", *argv]) == 0
    assert [json.loads(line)["concurrency"] for line in out.read_text().splitlines()] == [2]
    assert "skipped none K=0 at concurrency 4: not enough memory" in "".join(capsys.readouterr())


MISTAKES = {
    "--preset gpt-5": "known are",
    "--preset qwen3-0.6b -K 99": "above 32",
    "--preset qwen3-0.6b --layers 99": "has 28",
    "--preset qwen3-0.6b -K 2 --synthetic-acceptance-length 3.5": "1 to 3",
    "--preset qwen3-0.6b --method none --synthetic-acceptance-length 2": "a method that drafts",
    "--preset qwen3-0.6b --method none -K 3": "-K needs a method",
    "--preset qwen3-0.6b --max-tokens 50000": "40960 positions",
}


@pytest.mark.parametrize(("argv", "message"), MISTAKES.items())
def test_mistakes_are_reported_before_any_weight_is_made(argv, message, capsys, tmp_path):
    out = ["--no-cache", "--out", str(tmp_path / "x")]
    assert main(["decode-step", *argv.split(), *out]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
