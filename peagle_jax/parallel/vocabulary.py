"""Reductions and selections over the vocabulary, whose logits may be shared by several devices.

Device d holds the columns d * w .. (d + 1) * w of [..., V]; columns at V and above are padding with logits
of -inf. Scalars of a row (maximum, argmax, sum) travel, and are merged by ascending rank on every device.
Only sorting needs whole rows: then each device takes some of the rows (`by_rows`). On one device each
function is the plain operation.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from peagle_jax.parallel import partition
from peagle_jax.parallel.partition import AXIS, gathered
from peagle_jax.parallel.shares import vocabulary_rows


def ids(width: int) -> jax.Array:
    """[w] int32, token ids of this device's columns."""
    local = jnp.arange(width)
    return local if partition.size() == 1 else partition.rank() * width + local


def real(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Logits [..., w] with -inf in the columns of padding."""
    if logits.shape[-1] * partition.size() == vocab_size:
        return logits
    return jnp.where(is_real(logits.shape, vocab_size), logits, -jnp.inf)


def is_real(shape: tuple[int, ...], vocab_size: int) -> jax.Array:
    """bool of the shape [..., w]: True but in the columns of padding."""
    if partition.size() == 1:
        return jnp.ones(shape, jnp.bool)
    return jnp.broadcast_to(ids(shape[-1]) < vocab_size, shape)


def columns(x: jax.Array) -> jax.Array:
    """This device's columns [..., w] of a replicated array [..., V]; zeros (False) for padding."""
    n, V = partition.size(), x.shape[-1]
    if n == 1:
        return x
    width = vocabulary_rows(V, n)
    x = jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, n * width - V)))
    return lax.dynamic_slice_in_dim(x, partition.rank() * width, width, axis=-1)


def whole(x: jax.Array, vocab_size: int) -> jax.Array:
    """The columns of all devices: [..., w] -> [..., V]."""
    if partition.size() == 1:
        return x
    return lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)[..., :vocab_size]


def maximum(x: jax.Array) -> jax.Array:
    """Largest value of each row: [..., V] -> [...]."""
    local = x.max(-1)
    return local if partition.size() == 1 else gathered(local).max(0)


def total(x: jax.Array) -> jax.Array:
    """Sum of each row: [..., V] -> [...]."""
    return partition.total(x.sum(-1))


def any_of(x: jax.Array) -> jax.Array:
    """Whether a row [..., V] bool has a True: [..., 1]."""
    local = x.any(-1, keepdims=True)
    return local if partition.size() == 1 else gathered(local).any(0)


def _merged(index: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Argmax [...] int32 and maximum [...] float32 of whole rows, from those of this device's columns.

    `index` is a token id. Ties go to the lower rank, whose ids are lower, and the first NaN is the largest.
    """
    bits = lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
    indices, bits = jnp.moveaxis(gathered(jnp.stack([index.astype(jnp.int32), bits])), 1, 0)
    values = lax.bitcast_convert_type(bits, jnp.float32)
    best, at = values[0], indices[0]
    for value, index in zip(values[1:], indices[1:], strict=True):
        larger = (value > best) | (jnp.isnan(value) & ~jnp.isnan(best))
        best, at = jnp.where(larger, value, best), jnp.where(larger, index, at)
    return at, best


def first_largest(index: jax.Array, value: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Those of whole rows, from an argmax [...] and a maximum [...] over this device's `width` columns."""
    if partition.size() == 1:
        return index, value
    at, best = _merged(index + partition.rank() * width, value)
    return at, best.astype(value.dtype)


def argmax(x: jax.Array) -> jax.Array:
    """As `jnp.argmax(x, axis=-1)`: [..., V] -> [...] int32."""
    index = jnp.argmax(x, axis=-1)
    if partition.size() == 1:
        return index
    value = jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]
    return first_largest(index, value, x.shape[-1])[0]


def one_hot(tokens: jax.Array, width: int, dtype: jnp.dtype) -> jax.Array:
    """[...] int32 -> this device's columns [..., w] of the one-hot rows."""
    if partition.size() > 1:
        tokens = tokens - partition.rank() * width
    return jax.nn.one_hot(tokens, width, dtype=dtype)


def at_tokens(rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """Gathers `rows[..., token]`: rows [..., V] and tokens [...] -> [...]."""
    if partition.size() == 1:
        return jnp.take_along_axis(rows, tokens[..., None], axis=-1)[..., 0]
    width = rows.shape[-1]
    local = jnp.clip(tokens - partition.rank() * width, 0, width - 1)
    values = gathered(jnp.take_along_axis(rows, local[..., None], axis=-1)[..., 0])
    return jnp.take_along_axis(values, (tokens // width)[None], axis=0)[0]


def by_columns(f: Callable, weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """`f(weight[tokens])`, where each column of the result comes from the row of one token.

    Each device computes the columns of its own rows, and the values travel instead of the rows.

    Args:
      f: function from rows [..., C, D] to values [..., A, C].
      weight: [w, D], this device's rows.
      tokens: [..., C] int32.
    """
    if partition.size() == 1:
        return f(weight[tokens])
    rows = weight.shape[0]
    columns = gathered(f(weight[jnp.clip(tokens - partition.rank() * rows, 0, rows - 1)]))
    owner = jnp.broadcast_to((tokens // rows)[..., None, :], columns.shape[1:])
    return jnp.take_along_axis(columns, owner[None], axis=0)[0]


def scattered(tokens: jax.Array, values: jax.Array, vocab_size: int) -> jax.Array:
    """Rows [..., w] with `values` [..., C] at `tokens` [..., C] int32 and 0 elsewhere."""
    n = partition.size()
    width = vocabulary_rows(vocab_size, n)
    if n > 1:
        tokens = tokens - partition.rank() * width
        tokens = jnp.where(tokens < 0, width, tokens)  # a negative index would count from the end
    rows = jnp.zeros((values.size // values.shape[-1], width), values.dtype)
    flat = lambda x: x.reshape(-1, x.shape[-1])
    at = (jnp.arange(len(rows))[:, None], flat(tokens))
    return rows.at[at].set(flat(values), mode="drop").reshape(*values.shape[:-1], width)


def by_rows(f: Callable, logits: jax.Array, *values: jax.Array):
    """`f(logits, *values)`, where `f` computes each row by itself and needs the row's whole vocabulary.

    The devices exchange columns for rows, so that each has 1/n of the rows with all columns, and gather the
    results. The padding of the vocabulary stays, at the end of each row.

    Args:
      logits: [..., V].
      values: each [..., ...], with the leading axes of the logits.
    Returns:
      A tree of arrays with the leading axes of the logits.
    """
    n = partition.size()
    if n == 1:
        return f(logits, *values)
    *leading, width = logits.shape
    count = logits.size // width
    share = -(-count // n)

    def flat(x):
        x = x.reshape(count, *x.shape[len(leading) :])
        return jnp.pad(x, ((0, share * n - count), *[(0, 0)] * (x.ndim - 1)))

    rows = lax.all_to_all(flat(logits), AXIS, split_axis=0, concat_axis=1, tiled=True)
    own = lambda x: lax.dynamic_slice_in_dim(flat(x), partition.rank() * share, share)
    with partition.over(1):
        results = f(rows, *map(own, values))
    gather = lambda x: lax.all_gather(x, AXIS, tiled=True)[:count].reshape(*leading, *x.shape[1:])
    return jax.tree.map(gather, results)
