"""Distillation losses over a vocabulary, in float32, without materialising all logits.

`distill` sums a divergence of teacher p and student q over rows. It scans the rows in chunks. Under
differentiation the forward pass also computes each chunk's gradient with respect to its logits (`q - p`
for the KL divergence), so logits are computed once and never stored.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Loss = Literal["kl", "tv", "lk", "unlikely"]
"""KL(p || q); total variation 1 - sum(min(p, q)); their mix that turns from KL to TV as the acceptance
rate sum(min(p, q)) grows (LK losses, arXiv 2602.23881); or -log(1 - sum(p * q)) while sum(p * q) is above 0.3,
which makes the teacher's tokens unlikely (unlikelihood training, arXiv 1908.04319, equation 2)."""

LK_ETA = 3.0
_LEAST_REST = 1e-4
"""Floor of 1 - sum(p * q): bounds the loss of a token that is certain."""
_UNLIKELY = 0.3
"""Tokens below this probability count as unlikely: pushed further down, they only raise nonsense."""


class Labels(NamedTuple):
    """Teacher that puts all probability on one token: KL is the cross entropy."""

    token: jax.Array  # [R] int32

    def compare(self, z: jax.Array):
        """Student logits [C,V] -> (KL [C], teacher probabilities [C,V], student's choice is right)."""
        at = self.token[:, None]
        kl = jax.nn.logsumexp(z, axis=-1) - jnp.take_along_axis(z, at, axis=1)[:, 0]
        probs = jnp.arange(z.shape[-1]) == at
        return kl, probs.astype(z.dtype), jnp.argmax(z, -1) == self.token


class Distribution(NamedTuple):
    """Teacher given by another model's normed states and unembedding."""

    hidden: jax.Array  # [R, Dt]
    weight: jax.Array  # [V, Dt]
    temperature: float = 1.0  # of the teacher's softmax; below 1 sharpens the labels
    soft_cap: float | None = None  # `TargetConfig.logit_softcap`

    def compare(self, z: jax.Array):
        zt = _taught(self.hidden, self.weight, self.temperature, self.soft_cap)
        log_p = jax.nn.log_softmax(zt, axis=-1)
        p = jnp.exp(log_p)
        kl = (p * (log_p - jax.nn.log_softmax(z, axis=-1))).sum(-1)
        return kl, p, jnp.argmax(z, -1) == jnp.argmax(zt, -1)


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


def _taught(hidden: jax.Array, weight: jax.Array, temperature: float, soft_cap: float | None):
    """The teacher's logits [C, V] float32, capped as in serving, then divided by the temperature."""
    z = _logits(hidden, weight)
    return (z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)) / temperature


def tabulate(
    hidden: jax.Array, weight: jax.Array, temperature: float, soft_cap: float | None, chunk: int
):
    """(probs, entropy, choice) of a `Table`, for normed states [P, Dt] and an unembedding [V, Dt]."""

    def one(rows):
        zt = _taught(rows, weight, temperature, soft_cap)
        log_p = jax.nn.log_softmax(zt, axis=-1)
        p = jnp.exp(log_p)
        return p.astype(hidden.dtype), (p * log_p).sum(-1), jnp.argmax(zt, -1)

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
    """The teacher's per-row arrays as [rows/chunk, chunk, ...]; shared arrays stay outside the scan."""
    first = _pad_rows(teacher[0], rows)
    return first.reshape(-1, chunk, *first.shape[1:])


def _divergence(loss: Loss, z: jax.Array, kl: jax.Array, p: jax.Array):
    """Per row: the loss [C] and its gradient [C, V] with respect to the student's logits z.

    d min(p, q) / dq is 1 where q < p and 0 where q > p; the softmax turns a gradient g of q into
    q * (g - sum(q * g)). The mix's weight is a constant of its row.
    """
    q = jax.nn.softmax(z, axis=-1)
    if loss == "kl":
        return kl, q - p
    if loss == "unlikely":
        hit = (p * q).sum(axis=-1)
        rest = jnp.maximum(1 - hit, _LEAST_REST)
        likely = hit > _UNLIKELY
        gradient = q * (p - hit[:, None]) / rest[:, None]
        return jnp.where(likely, -jnp.log(rest), 0.0), jnp.where(likely[:, None], gradient, 0.0)
    short = q < p
    overlap = jnp.minimum(p, q).sum(axis=-1)
    tv_gradient = q * ((q * short).sum(axis=-1, keepdims=True) - short)
    if loss == "tv":
        return 1 - overlap, tv_gradient
    share = jnp.exp(-LK_ETA * overlap)
    gradient = share[:, None] * (q - p) + (1 - share)[:, None] * tv_gradient
    return share * kl + (1 - share) * (1 - overlap), gradient


def _run(x, weight, teacher, importance, chunk: int, loss: Loss, *, with_gradient: bool):
    R = x.shape[0]
    chunk = min(chunk, R)
    rows = -(-R // chunk) * chunk
    cut = lambda a: _pad_rows(a, rows).reshape(-1, chunk, *a.shape[1:])

    def step(dw, inputs):
        xs, ts, ws = inputs
        # Gradients are rounded to the states' dtype. Logits of that dtype halve the step's largest traffic.
        z = _logits(xs, weight, xs.dtype if with_gradient else jnp.float32)
        kl, p, match = teacher._replace(**{teacher._fields[0]: ts}).compare(z)
        value, dz = _divergence(loss, z, kl, p)
        if not with_gradient:
            return dw, (value, kl, match, ws[:0])
        dz = (dz * ws[:, None]).astype(x.dtype)
        precision = _precision(x)
        dx = jnp.einsum("cv,vd->cd", dz, weight, precision=precision)
        dw = dw + jnp.einsum(
            "cv,cd->vd", dz, xs, precision=precision, preferred_element_type=jnp.float32
        )
        return dw, (value, kl, match, dx)

    dw = jnp.zeros(weight.shape, jnp.float32) if with_gradient else jnp.zeros(())
    dw, (*scores, dx) = jax.lax.scan(
        step, dw, (cut(x), _split(teacher, rows, chunk), cut(importance))
    )
    value, kl, match = (score.reshape(-1)[:R] for score in scores)
    result = Distilled((value * importance).sum(), kl, match)
    if not with_gradient:
        return result, None
    return result, (dx.reshape(-1, x.shape[1])[:R], dw.astype(weight.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def distill(
    x: jax.Array,
    weight: jax.Array,
    teacher: Labels | Distribution,
    importance: jax.Array,
    chunk: int,
    loss: Loss,
) -> Distilled:
    """`sum_r importance_r * loss(teacher_r, softmax(x_r @ weight.T))`, with per-row metrics.

    Args:
      x: [R, D] normed states of the student.
      weight: [V, D] its unembedding.
      teacher: one distribution per row; no gradient flows into it.
      importance: [R] float32; 0 leaves a row out.
      chunk: rows per chunk of logits.
    """
    return _run(x, weight, teacher, importance, chunk, loss, with_gradient=False)[0]


def _distill_fwd(x, weight, teacher, importance, chunk, loss):
    result, gradients = _run(x, weight, teacher, importance, chunk, loss, with_gradient=True)
    return result, (gradients, teacher, importance)


def _distill_bwd(chunk, loss, saved, cotangent):
    (dx, dw), teacher, importance = saved
    g = cotangent.total
    scale = lambda d: (d * g).astype(d.dtype)
    zero = lambda a: jnp.zeros_like(a) if jnp.issubdtype(a.dtype, jnp.inexact) else None
    return scale(dx), scale(dw), jax.tree.map(zero, teacher), jnp.zeros_like(importance)


distill.defvjp(_distill_fwd, _distill_bwd)
