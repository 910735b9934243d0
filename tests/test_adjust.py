"""Adjusted logits against their definition in NumPy, and the law of what `verify` emits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.method.adjust import (
    _MOST,
    Adjustments,
    Controls,
    adjusted,
    count_tokens,
    fill,
    init_controls,
)
from peagle_jax.method.plan import ControlsPlan, mask_words
from peagle_jax.method.verify import Verdict, verify
from peagle_jax.sampling_params import MAX_BIAS, MAX_END_IDS
from tests.laws import check_law
from tests.request_params import request_params

V, J, PROMPT = 45, 3, 6
"""45 tokens: two words of a mask, the second partly used."""


def packed(allowed: np.ndarray) -> np.ndarray:
    """Allowed tokens [..., V] bool as a mask [..., mask_words(V)] int32."""
    bits = np.packbits(allowed, axis=-1, bitorder="little")
    padding = 4 * mask_words(allowed.shape[-1]) - bits.shape[-1]
    return np.pad(bits, [*[(0, 0)] * (allowed.ndim - 1), (0, padding)]).view(np.int32)


def controls_plan(slot: int, rng, num_output: int, **given) -> tuple[ControlsPlan, dict]:
    """Random controls of one slot as the host sends them, and as the reference reads them."""
    tokens = rng.integers(0, V, 40).astype(np.int32)
    biased = rng.permutation(V)[:9]
    one = dict(
        prompt=tokens[:PROMPT],
        output=tokens[PROMPT : PROMPT + num_output],
        bias=dict(zip(biased.tolist(), [*rng.normal(0, 3, 7), -np.inf, -np.inf], strict=True)),
        base=float(rng.choice([0.0, -np.inf])),
        ends=rng.permutation(V)[:4],
        min_tokens=int(rng.integers(0, num_output + J + 2)),
        repetition=rng.choice([1.0, 0.7, 1.6]),
        frequency=rng.choice([0.0, -0.5, 0.8]),
        presence=rng.choice([0.0, 1.1, -0.9]),
    )
    one |= given
    pad = lambda values, size, fill, dtype: np.pad(
        np.asarray(values, dtype), (0, size - len(values)), constant_values=fill
    )
    plan = ControlsPlan(
        slot=np.int32(slot),
        tokens=tokens,
        num_prompt=np.int32(PROMPT),
        num_tokens=np.int32(PROMPT + num_output),
        bias_ids=pad(list(one["bias"]), MAX_BIAS, 2**31 - 1, np.int32),
        bias=pad(list(one["bias"].values()), MAX_BIAS, 0, np.float32),
        base=np.float32(one["base"]),
        end_ids=pad(one["ends"], MAX_END_IDS, 2**31 - 1, np.int32),
        min_end=np.int32(PROMPT + one["min_tokens"]),
        **{name: np.float32(one[name]) for name in ("repetition", "frequency", "presence")},
    )
    return plan, one


def reference(logits: np.ndarray, drafts: list[int], one: dict, mask: np.ndarray | None):
    """The definitions of docs/serving.md for one row: logits [V] after the output and `drafts`."""
    output = [*one["output"], *drafts]
    forbidden = set() if mask is None else set(np.flatnonzero(~mask))
    new = logits.astype(np.float64)
    banned, ends = set(), set()
    for token in range(V):
        bias = one["bias"].get(token, one["base"])
        if bias == -np.inf:
            banned.add(token)
        else:
            new[token] += bias
        if len(output) < one["min_tokens"] and token in one["ends"]:
            ends.add(token)
        count = output.count(token)
        if count or token in one["prompt"]:
            new[token] *= 1 / one["repetition"] if new[token] > 0 else one["repetition"]
        new[token] -= one["frequency"] * count + one["presence"] * (count > 0)
    for more in (banned, ends):
        if len(forbidden | more) < V:
            forbidden |= more
    new[list(forbidden)] = -np.inf
    return new


def params(B: int, *, num_draft=J, **changes):
    seed = jax.random.key_data(jax.random.split(jax.random.key(1), B))
    return request_params(B, seed=seed, num_draft=num_draft, **changes)


jitted = jax.jit(verify)
filled = jax.jit(fill)


def batch(B: int, seed: int, **given) -> tuple[Controls, list[dict]]:
    """Controls of B slots and a dummy, with outputs of 0 to 19 tokens."""
    rng = np.random.default_rng(seed)
    controls, ones = init_controls(B + 1, V), []
    for slot in range(B):
        plan, one = controls_plan(slot, rng, int(rng.integers(0, 20)), **given)
        controls = filled(controls, plan)
        ones.append(one)
    return controls, ones


def test_adjusted_logits_follow_their_definition(num_cases):
    B = num_cases("rows with random sampling controls", 60, least=20)
    rng = np.random.default_rng(4)
    controls, ones = batch(B, 5)
    slots = rng.permutation(B).astype(np.int32)
    logits = rng.normal(0, 2, (B, J + 1, V)).astype(np.float32)
    drafts = rng.integers(0, V, (B, J)).astype(np.int32)
    mask = rng.random((B, J + 1, V)) < rng.choice([0.05, 0.5, 1.0], (B, J + 1, 1))
    mask[..., 0] |= ~mask.any(-1)
    adjusts, constrained = rng.integers(0, 2, (2, B))
    start = np.array([PROMPT + len(ones[slot]["output"]) for slot in slots])
    given = (
        drafts,
        start[:, None] + np.arange(J + 1),
        params(B, adjusts=adjusts),
        Adjustments(controls, slots, jnp.asarray(constrained), packed(mask)),
    )
    got = jax.jit(adjusted)(logits, *given)
    plain = dict(bias={}, base=0.0, ends=(), min_tokens=0, repetition=1, frequency=0, presence=0)
    num_ignored = 0
    for b in range(B):
        one = ones[slots[b]] if adjusts[b] else ones[slots[b]] | plain
        for j in range(J + 1):
            allowed = mask[b, j] if constrained[b] else None
            want = reference(logits[b, j], drafts[b, :j].tolist(), one, allowed)
            np.testing.assert_allclose(got[b, j], want, rtol=2e-5, atol=2e-5)
            num_ignored += np.isfinite(want[list(one["bias"])]).sum() < len(one["bias"])
    assert num_ignored > 0
    untouched = (adjusts == 0) & (constrained == 0)
    assert untouched.any()
    np.testing.assert_array_equal(np.asarray(got)[untouched], logits[untouched])


@pytest.mark.sampled(1, slow=1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_probs", [False, True])
def test_a_requests_bits_do_not_depend_on_the_controls_of_others(with_probs, temperature):
    B, rng = 32, np.random.default_rng(8)
    logits = rng.normal(0, 1.5, (B, J + 1, V)).astype(np.float32)
    drafts = logits.argmax(-1)[:, :J].astype(np.int32)
    q = np.asarray(jax.nn.softmax(logits[:, :J] * 0.5), np.float32) if with_probs else None
    positions = PROMPT + 20 + np.tile(np.arange(J + 1), (B, 1))
    controls, _ = batch(B, 6)
    others = np.arange(B) >= B // 2
    mask = packed(rng.random((B, J + 1, V)) < 0.5)
    given = lambda constrained: Adjustments(controls, np.arange(B), constrained, mask)
    run = lambda on, top_k: jitted(
        logits,
        drafts,
        q,
        positions,
        params(B, temperature=temperature, adjusts=on, top_k=top_k),
        given(jnp.asarray(on, jnp.int32)),
    )
    for top_k in (np.zeros(B, int), np.where(others, 4, 0)):
        alone = run(np.zeros(B, int), top_k)
        plain = jitted(
            logits, drafts, q, positions, params(B, temperature=temperature, top_k=top_k)
        )
        beside = run(others.astype(int), top_k)
        for one, two, three in zip(alone, plain, beside, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(np.asarray(one)[~others], np.asarray(three)[~others])
        assert (np.asarray(alone.tokens) != np.asarray(beside.tokens))[others].any()


def test_a_mask_without_tokens_flags_its_row():
    mask = np.ones((2, J + 1, V), bool)
    mask[1, 2] = False
    given = Adjustments(init_controls(3, V), np.arange(2), np.ones(2, np.int32), packed(mask))
    logits = np.random.default_rng(0).normal(0, 1, (2, J + 1, V)).astype(np.float32)
    drafts, positions = np.zeros((2, J), np.int32), np.tile(np.arange(J + 1), (2, 1))
    verdict = jitted(logits, drafts, None, positions, params(2), given)
    np.testing.assert_array_equal(verdict.finite, [[1, 1, 1, 1], [1, 1, 0, 1]])


def emitted_pairs(verdict: Verdict) -> tuple[np.ndarray, np.ndarray]:
    tokens, count = np.asarray(verdict.tokens), np.asarray(verdict.count)
    return tokens, count == 2


@pytest.mark.sampled(1, slow=4)
@pytest.mark.parametrize("mode", ["argmax", "sample", "forced"])
@pytest.mark.parametrize("kind", ["penalties", "mask", "both"])
def test_emitted_tokens_have_the_law_of_the_adjusted_target(kind, mode, num_cases):
    """Two tokens of many equal requests, against the reference's law of plain sampling.

    `forced` drafts are certain under a law of their own, as `step` hands them on in sampled mode.
    """
    B = num_cases("sampled rounds against the adjusted law", 20_000, least=20_000)
    rng = np.random.default_rng(3)
    plan, one = controls_plan(
        0,
        rng,
        6,
        bias={3: 1.5, 4: -np.inf, 9: -2.0},
        base=0.0,
        min_tokens=8,
        presence=1.1,
        ends=np.arange(10, 14),
    )
    if kind == "mask":
        one |= dict(bias={}, min_tokens=0, repetition=1, frequency=0, presence=0)
    controls = filled(init_controls(2, V), plan)
    table = rng.normal(0, 1.5, (1 + V, V)).astype(np.float32)
    masks = rng.random((1 + V, V)) < 0.6  # of the first row, and of the second by token
    if kind == "penalties":
        masks[:] = True
    softmax = lambda row: np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    law = partial(reference, one=one)
    p = softmax(law(table[0], [], mask=masks[0]))
    q = rng.dirichlet(np.full(V, 0.3)).astype(np.float32)
    q /= q.sum()
    first = rng.choice(V, B, p=np.asarray(q, np.float64) / q.sum(dtype=np.float64))
    if mode != "sample":
        first[:] = p.argmax()
    if mode == "forced":
        q = np.eye(V, dtype=np.float32)[first[0]]
    drafts = first[:, None].astype(np.int32)
    verdict = jitted(
        np.stack([np.broadcast_to(table[0], (B, V)), table[1 + first]], axis=1),
        drafts,
        None if mode == "argmax" else np.broadcast_to(q, (B, 1, V)),
        np.broadcast_to(PROMPT + 6 + np.arange(2), (B, 2)),
        params(B, temperature=1.0, num_draft=1, adjusts=kind != "mask"),
        Adjustments(
            controls,
            np.zeros(B, np.int32),
            np.full(B, kind != "penalties", np.int32),
            packed(np.stack([np.broadcast_to(masks[0], (B, V)), masks[1 + first]], axis=1)),
        ),
    )
    then = np.stack([softmax(law(table[1 + t], [t], mask=masks[1 + t])) for t in range(V)])
    tokens, accepted = emitted_pairs(verdict)
    assert 0.02 < accepted.mean() < 0.98
    assert not (p[tokens[:, 0]] == 0).any()
    check_law(np.bincount(tokens[:, 0], minlength=V), p * B)
    pairs = tokens[accepted]
    assert not (then[pairs[:, 0], pairs[:, 1]] == 0).any()
    by_first = np.bincount(pairs[:, 0], minlength=V)
    check_law(np.bincount(pairs[:, 1], minlength=V), by_first @ then)


def test_counts_stop_at_their_bound_however_many_tokens_a_round_has():
    """Four tokens in one round, and in four: the penalties are equal."""
    full = init_controls(1, V)
    full = full._replace(counts=full.counts.at[0, 3].set(_MOST - 2))
    slots, adjusts = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    at_once = count_tokens(full, slots, jnp.full((1, 4), 3), jnp.full(1, 4), adjusts)
    one_by_one = full
    for _ in range(4):
        one_by_one = count_tokens(one_by_one, slots, jnp.full((1, 1), 3), jnp.ones(1, int), adjusts)
    assert at_once.counts[0, 3] == one_by_one.counts[0, 3] == _MOST
    assert at_once.counts.sum() == _MOST
