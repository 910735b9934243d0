"""COD sampling and attention over elements, against the rules written out element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.method.draft_head import DraftHead
from peagle_jax.models import Decoder
from peagle_jax.rope_config import RopeConfig
from peagle_jax.training import cod, embedding, passes
from peagle_jax.training.acceptance import acceptance_length
from peagle_jax.training.attention import ElementAttention
from tests.tiny import attend_to

ROPE = RopeConfig(theta=10_000.0)


def _valid(key, B, S):
    """Intervals with holes, one sequence without any seed."""
    valid = jax.random.bernoulli(key, 0.8, (B, S))
    return valid.at[:, :3].set(False).at[-1].set(False)


@pytest.fixture(scope="module")
def elements():
    valid = _valid(jax.random.key(1), 4, 24)
    sample = jax.jit(cod.sample_elements, static_argnames=("num_depths", "rate", "min_rate"))
    return valid, sample(jax.random.key(2), valid, num_depths=5, rate=0.7, min_rate=0.4)


def test_elements_are_nested_and_count_as_the_paper_says(elements):
    valid, e = elements
    valid, anchor, used = (np.asarray(x) for x in (valid, e.anchor, e.used))
    for row in range(len(valid)):
        seeds = int(valid[row].sum())
        assert np.array_equal(used[row, : e.num_slots], valid[row])
        above = set(range(e.num_slots))
        for d in range(1, len(e.sizes) + 1):
            rows = slice(e.offsets[d], e.offsets[d + 1])
            kept = {int(a) for a in anchor[row, rows][used[row, rows]]}
            pool = {a for a in above if a + d < e.num_slots and valid[row, a + d]}
            limit = int(np.floor(max(0, seeds - d) * max(0.7**d, 0.4)))
            assert kept <= pool
            assert len(kept) == min(limit, len(pool))
            above = kept


def test_the_parent_of_an_entry_is_the_same_entry_of_the_block_above(elements):
    _, e = elements
    for d, size in enumerate(e.sizes[1:], start=2):
        block, above = (e.anchor[:, e.offsets[i] : e.offsets[i] + size] for i in (d, d - 1))
        assert np.array_equal(block, above)


def test_every_anchor_is_kept_equally_often():
    valid = jnp.ones((4000, 12), bool)
    e = cod.sample_elements(jax.random.key(0), valid, num_depths=3, rate=0.6, min_rate=0.1)
    rows = slice(e.offsets[2], e.offsets[3])
    kept = np.asarray(e.anchor[:, rows])[np.asarray(e.used[:, rows])]
    share = np.bincount(kept, minlength=12) / 4000
    # 12 seeds: 6 of the 11 anchors at depth 1, then 3 of those that have a slot two ahead.
    assert share[-2:].sum() == 0
    np.testing.assert_allclose(share[:10], share[:10].mean(), atol=0.03)


def _dense_attention(elements, q, k, v, window):
    """The attention rule of docs/algorithm.md ("Training") as a (rows x rows) mask."""
    anchor, depth = elements.anchor, jnp.asarray(elements.depth)
    aq, ak = anchor[:, :, None], anchor[:, None, :]
    dq, dk = depth[:, None], depth[None, :]
    context = (dk == 0) & (ak <= aq)
    if window is not None:
        context &= ak > aq + dq - window
    allowed = context | ((ak == aq) & (dk <= dq) & (dk > 0))
    allowed |= (dk == 0) & (dq == 0) & (ak == aq)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(allowed[:, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("chunk", [None, 5])
def test_element_attention_equals_the_masked_definition(elements, window, chunk):
    _, e = elements
    T = e.anchor.shape[1]
    keys = jax.random.split(jax.random.key(3), 4)
    q = jax.random.normal(keys[0], (4, T, 4, 8))
    k, v = (jax.random.normal(keys[i], (4, T, 2, 8)) for i in (1, 2))
    weight = jax.random.normal(keys[3], q.shape)
    # Rows that are in no chain of the loss attend to nothing meaningful; only used rows are compared.
    weight = weight * (e.used | (jnp.asarray(e.depth) == 0))[..., None, None]
    ours = lambda *a: (
        attend_to(ElementAttention(e, "xla", chunk), *a, window=window) * weight
    ).sum()
    dense = lambda *a: (_dense_attention(e, *a, window) * weight).sum()
    got, want = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(q, k, v) for f in (ours, dense))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4)


def _models(method, seed=0):
    target = TargetConfig(
        family="qwen3", vocab_size=40, hidden_size=16, num_layers=8, num_heads=4, num_kv_heads=2,
        head_dim=8, intermediate_size=24, norm_eps=1e-6, rope=ROPE, max_position=64,
        tie_embeddings=True, attention_bias=False, qk_norm=True, eos_ids=(0,),
    )  # fmt: skip
    head = DrafterConfig(
        method=method, vocab_size=40, draft_vocab_size=40, hidden_size=16, target_hidden_size=16,
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=24, norm_eps=1e-6,
        rope=ROPE, mask_token_id=1, own_embedding=method == "peagle",
    )  # fmt: skip
    target = Decoder(target, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    return target, DraftHead(head, dtype=jnp.float32, rngs=nnx.Rngs(seed + 1))


def _options(**fields):
    base = dict(
        continuations=None, batch=3, num_depths=4, rate=0.7, min_rate=0.3, step_decay=0.8,
        dtype="float32", attention="xla", query_chunk=None, loss_chunk=16,
        eval_sequences=4, num_draft=3,
    )  # fmt: skip
    return passes.DrafterOptions(**(base | fields))


def _text(S=12):
    tokens = jax.random.randint(jax.random.key(5), (3, S), 3, 40)
    return passes.Text(tokens, jnp.array([2, 4, 5]), jnp.array([S, S - 2, 7]))


def causal(rows, cache, *, window, scale, sinks):
    q, k, v = rows.heads()
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), cache


def _naive_rows(target, head, tokens, fused, anchor, depths, feed_back):
    """Logits at depths 0..depths-1 of one anchor: the whole prefix, then the chain, as in serving."""
    S = tokens.shape[0]
    fused = fused[None, : anchor + 1]
    rows = tokens[None, 1 : anchor + 2]
    if not feed_back:
        mask = jnp.full((1, depths - 1), head.config.mask_token_id)
        state = jnp.broadcast_to(head.fuse(head.mask_hidden[...]), (1, depths - 1, 16))
        rows = jnp.concatenate([rows, mask], 1)
        states = jnp.concatenate([fused, state], 1)
        positions = jnp.arange(rows.shape[1])[None]
        out, _ = head(target, rows, states, positions, [None] * 2, causal)
        return head.logits(target, out[0, anchor:])
    states, logits = fused, []
    for d in range(depths):
        positions = jnp.arange(rows.shape[1])[None]
        out, _ = head(target, rows, states, positions, [None] * 2, causal)
        logits.append(head.logits(target, out[0, -1]))
        if anchor + d + 2 >= S:
            break
        rows = jnp.concatenate([rows, tokens[None, anchor + d + 2, None]], 1)
        states = jnp.concatenate([states, head.feedback(out[:, -1:])], 1)
    return jnp.stack(logits)


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_training_rows_are_what_serving_computes(method):
    target, head = _models(method)
    text, options = _text(), _options()
    taps = target.config.default_taps

    @jax.jit
    def trained_on(target, head):
        valid = passes.slot_is_trained(text)
        run = passes.run_target(target, text, taps)
        if method == "peagle":
            elements = cod.all_elements(valid, 4)
            rows = passes.parallel_rows(head, target, run, elements, options)
        else:
            rows = passes.unrolled_rows(head, target, run, valid, options)
        return passes.compare(head, target, run, options, rows)

    @jax.jit
    def served(target, head):
        positions = jnp.broadcast_to(jnp.arange(12), text.tokens.shape)
        hidden, tapped, _ = target(text.tokens, positions, [None] * 8, causal, taps=taps)
        return jax.nn.log_softmax(target.unembed(hidden)), head.fuse(tapped)

    outcome = trained_on(target, head)
    kl, used = (np.asarray(x).reshape(3, 4, 12) for x in (outcome.kl, outcome.used))
    full, fused = served(target, head)
    full = np.asarray(full)
    for a in (0, 1, 5, 9):  # the first, one before a prompt ends, one within, the last
        rows = lambda tokens, fused, a=a: jax.nn.log_softmax(
            _naive_rows(target, head, tokens, fused, a, 4, method == "eagle3")
        )
        for b, logits in enumerate(np.asarray(jax.jit(jax.vmap(rows))(text.tokens, fused))):
            for d in range(min(4, len(logits))):
                P, L = int(text.prompt[b]), int(text.length[b])
                trained = P - 1 <= a + d <= L - 3
                if method == "eagle3":
                    trained &= a >= P - 1
                assert used[b, d, a] == trained
                if trained:
                    p = full[b, a + d + 1]
                    want = (np.exp(p) * (p - logits[d])).sum()
                    np.testing.assert_allclose(kl[b, d, a], want, rtol=2e-3, atol=2e-5)


def test_lookup_gradient_adds_up_repeated_tokens(monkeypatch):
    monkeypatch.setattr(embedding, "_CHUNK", 4)
    weight = jax.random.normal(jax.random.key(0), (9, 3))
    tokens = jnp.array([[1, 1, 8, 0, 1], [2, 8, 1, 3, 3]])
    g = jax.random.normal(jax.random.key(1), (2, 5, 3))
    ours = jax.grad(lambda w: (embedding.lookup(w, tokens) * g).sum())(weight)
    plain = jax.grad(lambda w: (w[tokens] * g).sum())(weight)
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_acceptance_length_walks_the_text_as_the_engine_does():
    match = np.zeros((1, 3, 10), bool)
    match[0, :, 2] = True  # the round at slot 2 accepts three drafts
    match[0, 0, 6] = True  # the round at slot 6 accepts one
    # Prompt 3, length 10: rounds start at slot 2 (4 tokens), 6 (2 tokens; slots 6 and 7).
    assert acceptance_length(match, np.array([3]), np.array([10]), 3) == 3.0
