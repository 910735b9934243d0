"""Distillation over a vocabulary, in float32, without materialising all logits.

`distill` sums the KL divergence of teacher p and student q over rows. It scans the rows in chunks.
Under differentiation the forward pass also computes each chunk's gradient with respect to its
logits, `q - p`, so logits are computed once and never stored.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Labels(NamedTuple):
    """Teacher that puts all probability on one token: KL is the cross entropy."""

    token: jax.Array  # [R] int32

    def compare(self, z: jax.Array):
        """Student logits [C,V] -> (KL [C], teacher's probabilities [C,V], choice is right [C])."""
        at = self.token[:, None]
        kl = jax.nn.logsumexp(z, axis=-1) - jnp.take_along_axis(z, at, axis=1)[:, 0]
        probs = jnp.arange(z.shape[-1]) == at
        return kl, probs.astype(z.dtype), jnp.argmax(z, -1) == self.token


class Table(NamedTuple):
    """Teacher as a table of distributions, computed once because many rows share one position."""

    index: jax.Array  # [R] int32
    probs: jax.Array  # [P, V], in the dtype of the computation
    entropy: jax.Array  # [P] float32, sum of p log p
    choice: jax.Array  # [P] int32

    def compare(self, z: jax.Array):
        p = self.probs[self.index].astype(jnp.float32)
        log_q = jax.nn.log_softmax(z, axis=-1)
        kl = self.entropy[self.index] - (p * log_q).sum(-1)
        return kl, p, jnp.argmax(z, -1) == self.choice[self.index]


def tabulate(hidden: jax.Array, weight: jax.Array, soft_cap: float | None, chunk: int):
    """(probs, entropy, choice) of a `Table`, for normed states [P, Dt] and an unembedding [V, Dt].

    Logits are capped as in serving (`TargetConfig.logit_softcap`).
    """

    def one(rows):
        z = _logits(rows, weight)
        z = z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)
        log_p = jax.nn.log_softmax(z, axis=-1)
        p = jnp.exp(log_p)
        return p.astype(hidden.dtype), (p * log_p).sum(-1), jnp.argmax(z, -1)

    return by_chunk(one, hidden, chunk)


def label_probabilities(x: jax.Array, weight: jax.Array, token: jax.Array, chunk: int) -> jax.Array:
    """The student's probability of one token a row: [R, D], [V, D], [R] -> float32 [R]."""

    def one(rows):
        states, labels = rows
        return jnp.exp(-Labels(labels).compare(_logits(states, weight, states.dtype))[0])

    return by_chunk(one, (x, token), chunk)


def by_chunk(f, rows, chunk: int):
    """Applies `f` to chunks of rows and concatenates the results."""
    R = len(jax.tree.leaves(rows)[0])
    chunk = min(chunk, R)
    total = -(-R // chunk) * chunk
    cut = lambda x: _pad_rows(x, total).reshape(-1, chunk, *x.shape[1:])
    out = jax.lax.map(f, jax.tree.map(cut, rows))
    return jax.tree.map(lambda x: x.reshape(total, *x.shape[2:])[:R], out)


class Distilled(NamedTuple):
    """`total` is differentiable; `kl` and `match` (top choices agree) are per row, for reports."""

    total: jax.Array  # []
    kl: jax.Array  # [R] float32
    match: jax.Array  # [R] bool


def _precision(x: jax.Array):
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _logits(x: jax.Array, weight: jax.Array, dtype=jnp.float32) -> jax.Array:
    """[C, D], [V, D] -> float32 [C, V], stored as `dtype` on the way."""
    z = jnp.einsum("cd,vd->cv", x, weight, precision=_precision(x), preferred_element_type=dtype)
    return z.astype(jnp.float32)


def _pad_rows(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, [(0, rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def _split(teacher, rows: int, chunk: int):
    """The teacher's per-row array as [rows/chunk, chunk, ...]; others are not scanned."""
    first = _pad_rows(teacher[0], rows)
    return first.reshape(-1, chunk, *first.shape[1:])


def _run(x, weight, teacher, importance, chunk: int, *, with_gradient: bool):
    R = x.shape[0]
    chunk = min(chunk, R)
    rows = -(-R // chunk) * chunk
    cut = lambda a: _pad_rows(a, rows).reshape(-1, chunk, *a.shape[1:])

    def step(dw, inputs):
        xs, ts, ws = inputs
        # Gradients are rounded to the states' dtype. Such logits halve the step's largest traffic.
        z = _logits(xs, weight, xs.dtype if with_gradient else jnp.float32)
        kl, p, match = teacher._replace(**{teacher._fields[0]: ts}).compare(z)
        if not with_gradient:
            return dw, (kl, match, ws[:0])
        dz = ((jax.nn.softmax(z, axis=-1) - p) * ws[:, None]).astype(x.dtype)
        precision = _precision(x)
        dx = jnp.einsum("cv,vd->cd", dz, weight, precision=precision)
        dw = dw + jnp.einsum(
            "cv,cd->vd", dz, xs, precision=precision, preferred_element_type=jnp.float32
        )
        return dw, (kl, match, dx)

    dw = jnp.zeros(weight.shape, jnp.float32) if with_gradient else jnp.zeros(())
    dw, (*scores, dx) = jax.lax.scan(
        step, dw, (cut(x), _split(teacher, rows, chunk), cut(importance))
    )
    kl, match = (score.reshape(-1)[:R] for score in scores)
    result = Distilled((kl * importance).sum(), kl, match)
    if not with_gradient:
        return result, None
    return result, (dx.reshape(-1, x.shape[1])[:R], dw.astype(weight.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def distill(
    x: jax.Array,
    weight: jax.Array,
    teacher: Labels | Table,
    importance: jax.Array,
    chunk: int,
) -> Distilled:
    """`sum_r importance_r * KL(teacher_r || softmax(x_r @ weight.T))`, with per-row metrics.

    Args:
      x: [R, D] normed states of the student.
      weight: [V, D] its unembedding.
      teacher: one distribution per row; no gradient flows into it.
      importance: [R] float32; 0 leaves a row out.
      chunk: rows per chunk of logits.
    """
    return _run(x, weight, teacher, importance, chunk, with_gradient=False)[0]


def _distill_fwd(x, weight, teacher, importance, chunk):
    result, gradients = _run(x, weight, teacher, importance, chunk, with_gradient=True)
    return result, (gradients, teacher, importance)


def _distill_bwd(chunk, saved, cotangent):
    (dx, dw), teacher, importance = saved
    g = cotangent.total
    scale = lambda d: (d * g).astype(d.dtype)
    zero = lambda a: jnp.zeros_like(a) if jnp.issubdtype(a.dtype, jnp.inexact) else None
    return scale(dx), scale(dw), jax.tree.map(zero, teacher), jnp.zeros_like(importance)


distill.defvjp(_distill_fwd, _distill_bwd)
