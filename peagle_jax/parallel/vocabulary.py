"""Reductions and selections over the vocabulary, whose logits may be shared by several devices.

Device d holds the columns d * w .. (d + 1) * w of [..., V]; columns at V and above are padding with
logits of -inf. Scalars of a row (maximum, argmax, sum, the largest few) travel, and are merged by
ascending rank on every device. On one device each function is the plain operation.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch
from peagle_jax.parallel import partition
from peagle_jax.parallel.partition import AXIS, gathered
from peagle_jax.parallel.shares import vocabulary_rows

_SPAN = 2048
"""Columns that `totals` adds first."""
_TILE, _LONG = 64, 4096  # columns of a tile of `local_argmax`, and of the shortest row with tiles


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


def in_spans(x: jax.Array, fill: float) -> jax.Array:
    """Columns in spans, the last one padded with `fill`: [..., V] -> [..., n, span]."""
    missing = -x.shape[-1] % _SPAN
    padded = jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, missing)), constant_values=fill)
    return padded.reshape(*x.shape[:-1], -1, _SPAN)


def totals(arrays: Sequence[jax.Array]) -> jax.Array:
    """Sums of each row of several arrays `in_spans` of one shape and dtype, in one message:
    [len(arrays), ...].

    All are added in the same order, in one pass over V. Spans are added first: on a CPU XLA adds
    the columns of several arrays one after the other, so without spans the error would grow with V.
    """
    zeros = [jnp.zeros((), x.dtype) for x in arrays]
    add = lambda xs, ys: [x + y for x, y in zip(xs, ys, strict=True)]
    added = lambda xs: lax.reduce(xs, zeros, add, (xs[0].ndim - 1,))
    return partition.total(jnp.stack(added(added(list(arrays)))))


def log_softmax(logits: jax.Array) -> jax.Array:
    """Log-probabilities at temperature 1: [..., V] -> [..., V]."""
    if partition.size() == 1:
        return jax.nn.log_softmax(logits, axis=-1)
    shifted = logits - maximum(logits)[..., None]
    return shifted - jnp.log(total(jnp.exp(shifted)))[..., None]


def top(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest values of each row, as `lax.top_k` orders them: ties by ascending id.

    Args:
      x: [..., V] float32. count: n, at most the number of columns without padding; then no column
        of padding is among them.
    Returns:
      Ids int32 and values float32, each [..., n].
    """
    width = x.shape[-1]
    values, index = lax.top_k(x, min(count, width))
    if partition.size() == 1:
        return index.astype(jnp.int32), values
    at = index.astype(jnp.int32) + partition.rank() * width
    found = gathered(jnp.stack([at, lax.bitcast_convert_type(values, jnp.int32)]))
    at, bits = jnp.moveaxis(found, 0, -2).reshape(2, *x.shape[:-1], -1)
    # Ties: the lower rank comes first, and has the lower ids.
    values, best = lax.top_k(lax.bitcast_convert_type(bits, jnp.float32), count)
    return jnp.take_along_axis(at, best, axis=-1), values


def any_of(x: jax.Array) -> jax.Array:
    """Whether a row [..., V] bool has a True: [..., 1]."""
    local = x.any(-1, keepdims=True)
    # As int32: no message has truth values.
    return local if partition.size() == 1 else gathered(local.astype(jnp.int32)).any(0)


def _merged(index: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Argmax [...] int32 and maximum [...] float32 of whole rows, from those of this device's
    columns.

    `index` is a token id. Ties go to the lower rank, whose ids are lower, and the first NaN is the
    largest.
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
    """Those of whole rows, from an argmax [...] and a maximum [...] over this device's `width`
    columns."""
    if partition.size() == 1:
        return index, value
    at, best = _merged(index + partition.rank() * width, value)
    return at, best.astype(value.dtype)


def argmax(x: jax.Array) -> jax.Array:
    """As `jnp.argmax(x, axis=-1)`: [..., V] -> [...] int32."""
    index = local_argmax(x)
    if partition.size() == 1:
        return index
    value = jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]
    return first_largest(index, value, x.shape[-1])[0]


def is_tiled(width: int) -> bool:
    """Whether `local_argmax` of rows [..., width] looks for the best tile first: on a CPU, where
    XLA's reductions of values with their places take 10 times as long as maxima."""
    return dispatch.platform() == "cpu" and width >= _LONG and width % _TILE == 0


def local_argmax(x: jax.Array) -> jax.Array:
    """As `jnp.argmax(x, axis=-1)`, of this device's columns."""
    if not is_tiled(x.shape[-1]):
        return jnp.argmax(x, axis=-1)
    tiles = x.reshape(*x.shape[:-1], -1, _TILE)
    # The maximum may pass over NaN (YNNPACK of jaxlib 0.11.2).
    most = jnp.where((tiles != tiles).any(axis=-1), jnp.nan, tiles.max(axis=-1))
    tile = jnp.argmax(most, axis=-1)
    best = jnp.take_along_axis(tiles, tile[..., None, None], axis=-2)[..., 0, :]
    return tile * _TILE + jnp.argmax(best, axis=-1)


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
