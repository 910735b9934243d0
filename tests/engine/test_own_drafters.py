"""Drafters of the user's own: what they get, what is refused, and that no draft changes a text."""

import json
import subprocess
import sys
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import pytest

from peagle_jax import ConfigError, Engine, EngineConfig, SamplingParams
from peagle_jax.method.drafter import Proposal, make_drafter
from peagle_jax.text import child_python
from tests import tiny
from tests.programs import one_bucket

pytestmark = pytest.mark.usefixtures("programs_without_controls")

CONFIG = EngineConfig(
    num_draft=3, max_num_seqs=2, max_model_len=64, prefill_chunk=8, page_size=4, dtype="float32"
)
LAYER = tiny.HEAD.attention(0)
PROMPTS = [[5, 9, 7, 3, 2, 8, 6, 4, 11, 12], [3, 4], [5, 9, 7, 3, 2, 8, 6, 4, 11, 99, 5], [77]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Constant:
    """Drafts one token always."""

    token: jax.Array  # [] int32
    num_draft: int = field(metadata=dict(static=True))

    def propose(self, target, inputs, cache):
        shape = (len(inputs.slots), self.num_draft)
        return Proposal(jnp.broadcast_to(self.token, shape), None), cache


def completions(engine: Engine) -> list[tuple]:
    done = one_bucket(engine).generate(PROMPTS, SamplingParams(max_tokens=20))
    engine.scheduler.check_integrity()
    return [(one.tokens, one.rounds, one.accepted_per_position, one.cached) for one in done]


@pytest.mark.slow
def test_taps_and_cache_are_those_of_a_head():
    target, head = tiny.target(), tiny.head()
    drafter = make_drafter(head, CONFIG.num_draft, "argmax")
    layers = [head.config.attention(i) for i in range(head.config.num_layers)]
    own = Engine(target, None, CONFIG, drafter=drafter, taps=head.config.taps, cache=layers)
    assert own.drafter_config.method == "own"
    built_in = Engine(target, head, CONFIG)
    assert completions(own) == completions(built_in)
    for name in (
        "drafts",
        "drafter_cache",
    ):  # random heads are never right, so texts tell too little
        found, wanted = (jax.tree.leaves(getattr(one._state, name)) for one in (own, built_in))
        assert all(map(jnp.array_equal, found, wanted))
        assert len(jnp.unique(found[0])) > 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("token", [-7, 127, 128, 2**31 - 1])
def test_no_draft_changes_a_text(token):
    """Ids that the vocabulary lacks too."""
    target = tiny.target(**tiny.ONE_LAYER)
    engine = Engine(target, None, CONFIG, drafter=Constant(jnp.int32(token), 3))
    assert [one[0] for one in completions(engine)] == tiny.greedy(target, PROMPTS, 20)


def test_a_drafter_without_probabilities_is_certain_of_its_drafts():
    drawn = dict(draft_sampling="sample", verify_method="token")
    params = SamplingParams(max_tokens=20, temperature=2.0, seed=3, ignore_eos=True)
    texts = []
    for config in (CONFIG, replace(CONFIG, **drawn)):
        engine = Engine(tiny.target(), None, config, drafter=Constant(jnp.int32(5), 3))
        texts.append([done.tokens for done in one_bucket(engine).generate(PROMPTS, params)])
    assert texts[0] == texts[1]


def test_a_normed_state_has_the_logits_of_the_target():
    target, hidden = tiny.target(**tiny.FAMILIES["gemma4"]), jnp.ones((2, 32))
    assert (target.logits(target.norm(hidden)) == target.unembed(hidden)).all()


class Loose:
    num_draft = 3


@dataclass(frozen=True)
class Unregistered(Constant):
    pass


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Flat(Constant):
    def propose(self, target, inputs, cache):
        return Proposal(jnp.zeros(len(inputs.slots), jnp.int32), None), cache

    def absorb(self, target, inputs, cache):
        return cache


@pytest.mark.parametrize(
    ("drafter", "given", "rule"),
    [
        (Loose(), {}, "must be a dataclass with a field num_draft"),
        (Unregistered(jnp.int32(1), 3), {}, "must be registered by"),
        (Constant(jnp.int32(1), 3), dict(taps=[4]), r"taps \[4\] must be numbers from 0 to 3"),
        (Constant(jnp.int32(1), 3), dict(cache=[LAYER]), "needs a method absorb"),
        (Flat(jnp.int32(1), 3), dict(cache=[(2, 8)]), "must hold an AttentionConfig"),
        (Flat(jnp.int32(1), 3), {}, r"proposes tokens int32\[1\]: they must be int32\[1, 3\]"),
        (None, dict(taps=[1]), "are for a drafter without a head"),
    ],
)
def test_what_is_no_drafter_is_refused_in_a_sentence(drafter, given, rule):
    config = replace(CONFIG, max_num_seqs=1)
    with pytest.raises(ConfigError, match=rule):
        one_bucket(Engine(tiny.target(), None, config, drafter=drafter, **given))


MODULE = '''
from dataclasses import dataclass, field
from typing import ClassVar
import jax, jax.numpy as jnp
from peagle_jax.method.drafter import Proposal
from peagle_jax.engine.device.program_descriptions import source_digest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Repeat:
    """Drafts the newest token again."""

    num_draft: int = field(metadata=dict(static=True))
    taps: ClassVar = (12,)
    program_key: ClassVar = source_digest(__file__)

    @classmethod
    def load(cls, target, config):
        return cls(config.num_draft)

    def propose(self, target, inputs, cache):
        assert inputs.taps.shape[-1] == target.config.hidden_size
        newest = jnp.take_along_axis(inputs.tokens, inputs.num_real[:, None] - 1, axis=1)
        return Proposal(jnp.repeat(newest, self.num_draft, axis=1), None), cache
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "repeat.py").write_text(MODULE)
    return tmp_path


def command(folder, module: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = child_python.environment() | {"XDG_CACHE_HOME": str(folder / "cache")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    line = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_command_line_finds_a_drafter_in_the_working_folder(folder):
    line = ["x = [0, 0, 0, 0,", "--drafter", "repeat:Repeat", "--max-tokens", "16", "--json"]
    done = command(folder, "peagle_jax", *line, "-K", "2", "--max-model-len", "64")
    assert done.returncode == 0, done.stderr
    completion = json.loads(done.stdout.splitlines()[0])
    assert completion["drafted"] > 0
    assert len(completion["tokens"]) == 16


@pytest.mark.slow
def test_processes_that_compile_import_the_drafter(folder):
    """With --compile-only a program that no child could compile is an error."""
    sizes = "--max-num-seqs 1 --max-model-len 64 --num-speculative-tokens 2 --prefill-chunk 16"
    line = ["--compile-only", "--drafter", "repeat:Repeat", *sizes.split()]
    done = command(folder, "serving", *line)
    assert done.returncode == 0, done.stderr
    assert "programs are in" in done.stdout
    assert "in this process" not in done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--drafter", "missing:Repeat"], "ModuleNotFoundError: No module named 'missing'"),
        (["--drafter", "repeat:Other"], "AttributeError: module 'repeat' has no attribute 'Other'"),
        (["--drafter", "repeat:Repeat", "--method", "peagle"], "method peagle is of a head"),
        (["--drafter", "repeat:Repeat", "--tensor-parallel", "2"], "runs on one device"),
    ],
)
def test_a_drafter_that_cannot_be_loaded_is_one_line(folder, arguments, rule):
    done = command(folder, "peagle_jax", "x", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert rule in line
