"""Sum, bias, norms, rope and cache write in one pass: the separate layers, and the kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm.api import rms_norm
from pallas_kernels.rope_write.api import Form, rope_write
from pallas_kernels.rope_write.reference import write_kv
from peagle_jax.models.layers import apply_rope
from peagle_jax.models.rope_angles import rope_angles
from peagle_jax.rope_config import RopeConfig

pytestmark = pytest.mark.sampled(1)

interpreted = pytest.mark.usefixtures("race_free")
by_reference = jax.jit(
    functools.partial(rope_write, implementation="reference"), static_argnames="form"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of sequences that start at `starts`, over page tables of `width` pages of 4 tokens."""

    starts: tuple[int, ...]
    T: int
    K: int
    H: int
    form: Form
    parts: int = 0
    width: int = 4
    qk_norm: bool = False
    bias: bool = False
    fp8: bool = False
    rotary_share: float = 1.0

    def inputs(self, dtype=jnp.bfloat16):
        """(qkv, pages of k and v) and what else `rope_write` takes."""
        B, width = len(self.starts), self.form.width(self.K, self.H)
        keys = iter(jax.random.split(jax.random.key(0), 8))
        shape = (B, self.T, width)
        if self.parts:
            qkv = jax.random.normal(next(keys), (self.parts, *shape), jnp.float32)
        else:
            qkv = jax.random.normal(next(keys), shape, dtype)
        pages = (B * self.width + 1, 4, self.K, self.H)
        kept = jnp.float8_e4m3fn if self.fp8 else dtype
        k_pages, v_pages = (jax.random.normal(next(keys), pages, dtype).astype(kept) for _ in "kv")
        weight = lambda: 1 + 0.2 * jax.random.normal(next(keys), (self.H,), dtype)
        order = np.random.default_rng(0).permutation(B * self.width)
        positions = jnp.asarray(self.starts, jnp.int32)[:, None] + jnp.arange(self.T)
        rope = RopeConfig(theta=1e4, rotary_share=self.rotary_share)
        options = dict(
            angles=rope_angles(rope, self.H, positions),
            page_table=jnp.asarray(1 + order.reshape(B, self.width), jnp.int32),
            positions=positions,
            form=self.form,
            norms=(weight(), weight()) if self.qk_norm else None,
            bias=jax.random.normal(next(keys), (width,), dtype) if self.bias else None,
        )
        return (qkv, k_pages, v_pages), options


CASES = {
    "qwen3": Case((3, 9), T=2, K=4, H=128, form=Form(num_heads=8), parts=3, qk_norm=True),
    "qwen2": Case((5,), T=2, K=1, H=128, form=Form(num_heads=7), parts=2, bias=True),
    "gpt-oss": Case((5,), T=2, K=4, H=64, form=Form(num_heads=4), parts=2, bias=True),
    "gpt-oss-ring": Case((37,), T=2, K=4, H=64, form=Form(num_heads=4, ring=True), bias=True),
    "gemma-local": Case(
        (2,), T=2, K=2, H=256, form=Form(num_heads=4, value_norm=True), qk_norm=True
    ),
    "gemma-global": Case(
        (2,),
        T=1,
        K=1,
        H=512,
        parts=2,
        qk_norm=True,
        rotary_share=0.25,
        form=Form(num_heads=2, value_norm=True, shared_kv=True),
    ),
    "fp8-cache": Case(
        (3, 9),
        T=2,
        K=4,
        H=64,
        parts=2,
        qk_norm=True,
        fp8=True,
        form=Form(num_heads=8, dtype=jnp.dtype(jnp.bfloat16)),
    ),
}


def layer_by_layer(pages, k_pages, v_pages, *, angles, page_table, positions, form, norms, bias):
    """What `peagle_jax.models.layers.Attention` does with its projection."""
    parts, dtype, (K, H) = pages, form.dtype or k_pages.dtype, k_pages.shape[2:]
    x = sum(parts[1:], start=parts[0]) if parts.ndim == 4 else parts
    x = (x if bias is None else x + bias.astype(x.dtype)).astype(dtype)
    heads = x.reshape(*x.shape[:-1], -1, H)
    q, k = heads[..., : form.num_heads, :], heads[..., form.num_heads : form.num_heads + K, :]
    v = k if form.shared_kv else heads[..., form.num_heads + K :, :]
    if norms is not None:
        q, k = (rms_norm(y, scale, eps=form.eps) for y, scale in zip((q, k), norms, strict=True))
    if form.value_norm:
        v = rms_norm(v, jnp.ones(H, dtype), eps=form.eps)
    q, k = apply_rope(q, angles), apply_rope(k, angles)
    where = dict(page_table=page_table, positions=positions, ring=form.ring)
    return q, *write_kv(k_pages, v_pages, k, v, **where)


@pytest.mark.sampled(1, slow=2)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_layers_one_after_the_other(name):
    args, options = CASES[name].inputs()
    got = rope_write(*args, **options, implementation="reference")
    for one, want in zip(got, layer_by_layer(*args, **options), strict=True):
        np.testing.assert_array_equal(one, want)


@pytest.mark.sampled(1, slow=2)
@interpreted
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_the_reference(name):
    args, options = CASES[name].inputs()
    got = rope_write(*args, **options, implementation="mosaic_gpu")
    want = by_reference(*args, **options)
    for one, other in zip(got, want, strict=True):
        # float32 inside, summed in another order: a rounding may fall the other way.
        assert one.dtype == other.dtype
        step = 2**-7 if one.dtype == jnp.bfloat16 else 2**-3
        np.testing.assert_allclose(
            one.astype(jnp.float32), other.astype(jnp.float32), rtol=step, atol=step
        )
        assert (one == other).mean() > 0.99


@interpreted
def test_a_row_does_not_depend_on_its_company():
    args, options = CASES["qwen3"].inputs()
    q, k, _ = rope_write(*args, **options, implementation="mosaic_gpu")
    qkv, *pages = args
    one = lambda x: x[1:, 1:]
    options |= {name: one(options[name]) for name in ("positions",)}
    options |= dict(angles=[one(x) for x in options["angles"]])
    options |= dict(page_table=options["page_table"][1:])
    alone, k_alone, _ = rope_write(qkv[:, 1:, 1:], *pages, **options, implementation="mosaic_gpu")
    np.testing.assert_array_equal(alone, one(q))
    page, offset = options["page_table"][0, 10 // 4], 10 % 4
    np.testing.assert_array_equal(k_alone[page, offset], k[page, offset])


@interpreted
def test_padding_and_positions_past_the_table_touch_no_real_page():
    case = Case((14, 0, 2), T=4, K=4, H=64, form=Form(num_heads=4))
    args, options = case.inputs()
    options["page_table"] = options["page_table"].at[1].set(0)
    got = rope_write(*args, **options, implementation="mosaic_gpu")
    want = by_reference(*args, **options)
    for one, other in zip(got[1:], want[1:], strict=True):
        np.testing.assert_array_equal(one[1:], other[1:])


@interpreted
def test_a_cache_in_fp8_saturates():
    args, options = CASES["fp8-cache"].inputs()
    (qkv, *pages), positions = args, np.asarray(options["positions"])
    page = np.take_along_axis(np.asarray(options["page_table"]), positions // 4, axis=1)
    options["norms"] = None
    for implementation in ("reference", "mosaic_gpu"):
        _, k, v = rope_write(1e5 * qkv, *pages, **options, implementation=implementation)
        written = [x[page, positions % 4].astype(jnp.float32) for x in (k, v)]
        assert all(np.isfinite(x).all() and abs(x).max() == 448 for x in written)


def test_wrong_shapes_and_dtypes_are_refused():
    (qkv, *pages), options = CASES["qwen3"].inputs()
    with pytest.raises(ValueError, match="must be"):
        rope_write(qkv[..., :-1], *pages, **options)
    with pytest.raises(ValueError, match="33 parts"):
        rope_write(jnp.tile(qkv, (11, 1, 1, 1)), *pages, **options)
    wide = [x.astype(jnp.float32) for x in pages]
    with pytest.raises(NotImplementedError, match="bfloat16 pages"):
        rope_write(qkv, *wide, **options, implementation="mosaic_gpu")


@pytest.mark.sampled(1, slow=2)
@interpreted
@pytest.mark.parametrize("name", CASES)
def test_a_row_that_is_not_finite_keeps_the_values_finite_and_marks_its_keys(name):
    """NaN in all of one row, and NaN and an infinity in the values of another."""
    case = CASES[name]
    (qkv, *pages), options = case.inputs()
    table, positions, form = options["page_table"], options["positions"], options["form"]
    page = lambda b, t: (int(table[b, positions[b, t] // 4 % case.width]), int(positions[b, t]) % 4)
    first = (form.num_heads + (0 if form.shared_kv else case.K)) * case.H  # of v's columns
    last_row = (*([0] if case.parts else []), -1, case.T - 1)
    broken = qkv.at[(*last_row, first)].set(jnp.nan).at[(*last_row, first + 3)].set(jnp.inf)
    places = [page(-1, case.T - 1)]
    if case.T > 1:
        broken = broken.at[..., 0, 0, :].set(jnp.nan)
        places.append(page(0, 0))
    for implementation in ("reference", "mosaic_gpu"):
        clean = rope_write(qkv, *pages, **options, implementation=implementation)
        q, k, v = rope_write(broken, *pages, **options, implementation=implementation)
        assert np.isfinite(np.asarray(v, np.float32)).all()
        assert (np.asarray(v[places[0]], np.float32)[0, [0, 3]] == 0).all()
        marked = np.asarray(k[places[0]], np.float32)[0]
        assert np.isnan(marked[[0, 3]]).all()
        if case.T > 1:
            assert np.isnan(np.asarray(k[places[1]], np.float32)).all()
            assert np.isnan(np.asarray(q[0, 0], np.float32)).all()
        others = np.ones(k.shape[:2], bool)
        for place in places:
            others[place] = False
        bits = lambda x: np.asarray(
            x.view(jnp.uint8) if x.dtype.itemsize == 1 else x.view(jnp.uint16)
        )
        for got, want in ((k, clean[1]), (v, clean[2])):
            np.testing.assert_array_equal(bits(got)[others], bits(want)[others])
        if case.T > 1:
            np.testing.assert_array_equal(bits(q)[0, 1], bits(clean[0])[0, 1])
