"""The recommended recipe: head, run and batch for a target, and what they will take."""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import BlockConfig, ConfigError, DrafterConfig, TargetConfig
from peagle_jax.method.block_head import make_head
from peagle_jax.models import build
from peagle_jax.training.passes import HeadOptions
from peagle_jax.training.texts import kept_shares
from peagle_jax.training.trainer import RunConfig

_TABLE_BYTES = 2**31  # of the teacher's distributions, [tokens of a piece of a batch, V]
_USED = 0.3  # share of a device's speed in products that a step reaches
_STATE_BYTES = 4 + 4 + 8 + 2  # float32 weight, gradient, Adam's two moments; the copy that computes
SELECTOR_SHARE = 0.2  # of the time


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Texts of a step, and the pieces whose gradients are accumulated."""

    batch: int
    length: int
    microbatches: int
    steps: int
    num_devices: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * self.length


def shape_of(
    config: TargetConfig,
    *,
    rows: int,
    heldout: int,
    length: int,
    step_tokens: int,
    epochs: float,
    num_devices: int = 1,
) -> Shape:
    """Steps of about `step_tokens`, in pieces whose table of distributions is bounded; each device
    has equally many rows."""
    share = max(1, min(step_tokens // length, rows, 4 * heldout) // num_devices)
    piece = max(1, _TABLE_BYTES // (2 * config.vocab_size * length))
    microbatches = next(n for n in range(-(-share // piece), share + 1) if share % n == 0)
    batch = share * num_devices
    steps = max(1, math.ceil(epochs * rows / batch))
    return Shape(
        batch=batch,
        length=length,
        microbatches=microbatches,
        steps=steps,
        num_devices=num_devices,
    )


def learning_rate(hidden_size: int) -> float:
    """Peak of Muon. 3e-3 suits a width of 256; wider models need less."""
    return round(min(3e-3, 3e-3 * (256 / hidden_size) ** 0.5), 6)


def head_config(
    target: TargetConfig,
    *,
    method: str,
    layers: int | None = None,
    mask_token_id: int | None = None,
    share: Collection[str] = (),
    draft_vocab: int | None = None,
    length: int | None = None,
) -> DrafterConfig:
    """A new head in the target's shape, by default with the layers of the released ones.

    Args:
      draft_vocab: number of tokens that are drafted; None: all.
      length: tokens of a training row.
      share: "embedding" and "unembedding": tables of the target in place of the head's own.
    """
    peagle, dflash = method == "peagle", method == "dflash"
    share = ("embedding", "unembedding") if dflash else share
    if draft_vocab is not None and (draft_vocab > target.vocab_size or "unembedding" in share):
        raise ConfigError(
            f"--draft-vocab {draft_vocab}: the target has {target.vocab_size} tokens, "
            "and a shared unembedding has all"
        )
    num_layers = layers or {"peagle": 4, "dflash": 5}.get(method, 1)
    taps = spread_taps(target) if dflash else None
    return DrafterConfig(
        method=method,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab or target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.mlp_size(target.num_layers - 1),
        norm_eps=target.norm_eps,
        rope=target.rope,
        num_taps=len(taps or target.default_taps),
        taps=taps,
        mask_token_id=None if method == "eagle3" else mask_token_id,
        own_embedding=peagle and "embedding" not in share,
        own_lm_head="unembedding" not in share,
        trained_num_draft=8 if peagle else 7,
        trained_length=length,
        qk_norm=dflash,
        block=BlockConfig(causal=(False,) * num_layers) if dflash else None,
    )


def spread_taps(target: TargetConfig) -> tuple[int, ...]:
    """Five taps, or as many as there are, from the output of layer 1 to that of layer L - 3: what
    released block drafters read."""
    last = max(1, target.num_layers - 3)
    return tuple(sorted({1 + round(1 + i * (last - 1) / 4) for i in range(5)}))


@dataclass(frozen=True, kw_only=True)
class Length:
    """Of a training: `steps`, or `minutes` instead."""

    steps: int
    minutes: float | None

    def share(self, share: float) -> "Length":
        minutes = None if self.minutes is None else share * self.minutes
        return Length(steps=max(1, round(share * self.steps)), minutes=minutes)


def head_run(plan: "Plan", out: Path, length: Length, seed: int) -> RunConfig:
    """Muon for the head's inner matrices."""
    rate = learning_rate(plan.target.hidden_size)
    return _run(plan, out, length, seed, optimizer="muon", rate=rate, weight_decay=0.1)


def selector_rank(hidden_size: int) -> int:
    """Inner width of a selector of a head of this width."""
    return min(256, hidden_size)


def selector_run(plan: "Plan", out: Path, length: Length, seed: int) -> RunConfig:
    return _run(plan, out, length, seed, optimizer="adamw", rate=1.5e-3, weight_decay=0.01)


def watched(run: RunConfig, plan: "Plan", patience: int | None, log_to: tuple[str, ...]):
    """The run with `patience` and loggers; with patience there are enough evaluations before the
    last cool-down to lose it."""
    every = run.eval_every
    if patience is not None:
        steps = run.steps or plan.shape.steps
        every = min(every, max(1, int(steps * (1 - run.decay) / (patience + 2))))
    sizes = dict(eval_every=every, save_every=min(run.save_every, every))
    return replace(run, patience=patience, log_to=log_to, **sizes)


def _run(plan, out, length, seed, *, optimizer: str, rate: float, weight_decay: float) -> RunConfig:
    every = max(1, min(500, length.steps // 4))
    return RunConfig(
        out=out,
        steps=length.steps if length.minutes is None else None,
        minutes=length.minutes,
        optimizer=optimizer,
        learning_rate=rate,
        adam_learning_rate=rate * 2 / 3,
        weight_decay=weight_decay,
        warmup=min(100, max(1, length.steps // 10)),
        decay=0.4,
        clip=1.0,
        microbatches=plan.shape.microbatches,
        num_devices=plan.shape.num_devices,
        seed=seed,
        log_every=min(50, every),
        eval_every=every,
        save_every=every,
    )


def head_options(plan: "Plan", texts: Path, dtype: str) -> HeadOptions:
    """Half of the anchors of each text are trained, a quarter of a block drafter's, whose anchors
    have rows for all depths; the selector takes all."""
    return HeadOptions(
        texts=texts,
        batch=plan.shape.batch,
        num_depths=plan.head.trained_num_draft,
        dtype=dtype,
        loss_chunk=loss_chunk(plan.target.vocab_size),
        anchors=plan.shape.length // (4 if plan.head.block else 2),
    )


def num_weights(model) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.eval_shape(model)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of a training, in weights and bytes, from configurations alone."""

    target: TargetConfig
    head: DrafterConfig
    shape: Shape
    target_bytes: int

    @property
    def head_weights(self) -> int:
        return num_weights(lambda: make_head(self.head, dtype=jnp.float32, rngs=nnx.Rngs(0)))

    @property
    def rows(self) -> float:
        """Rows of the head for each token: its own, and those of deeper drafts."""
        if self.head.block is not None:
            return 1 + 0.25 * (1 + self.head.trained_num_draft)
        kept = kept_shares(self.head.trained_num_draft)
        deep = float(kept.sum()) if self.head.method == "peagle" else len(kept)
        return 1 + 0.5 * (deep - 1)  # half of the anchors are picked

    def memory(self) -> dict[str, int]:
        """Bytes of a device by what needs them."""
        target, head, shape = self.target, self.head, self.shape
        tokens = shape.tokens // shape.num_devices // shape.microbatches
        inner = 12 * head.hidden_size + 4 * head.intermediate_size
        inner += 3 * (head.num_heads + 2 * head.num_kv_heads) * head.head_dim
        rows = int(tokens * self.rows)
        chunk = min(rows, loss_chunk(target.vocab_size))
        return {
            "target": self.target_bytes,
            "head, gradients, optimiser": _STATE_BYTES * self.head_weights,
            "target's states": 2 * tokens * (head.num_taps + 6) * target.hidden_size,
            "target's distributions": 2 * tokens * target.vocab_size,
            "head's activations": 2 * rows * head.num_layers * inner,
            "head's attention": self._attention_bytes(tokens),
            "logits of a chunk": 16 * chunk * head.draft_vocab_size,
        }

    def _attention_bytes(self, tokens: int) -> int:
        """Queries, outputs and gradients of P-EAGLE's rows, which lie at the slots of every depth
        while a layer attends (`picked.widened`): as many as steps of 20,480 tokens had."""
        head = self.head
        of_depth = 20 * tokens * head.num_heads * head.head_dim
        return of_depth * head.trained_num_draft if head.method == "peagle" else 0

    def flops(self) -> float:
        """Of a step: the target's pass and its logits, the head's two passes and its logits."""
        target, head, tokens = self.target, self.head, self.shape.tokens
        table = target.vocab_size * target.hidden_size
        tables = head.vocab_size * head.own_embedding + head.draft_vocab_size * head.own_lm_head
        inner = self.head_weights - tables * head.hidden_size
        of_head = 6 * self.rows * (inner + head.draft_vocab_size * head.hidden_size)
        return tokens * (2 * (active_weights(target) + table) + of_head)

    def report(self, tflops: float | None) -> str:
        """Lines of memory and time. Products run at `tflops`, or as fast as on this device."""
        shape, memory = self.shape, self.memory()
        speed = measured_speed() if tflops is None else 1e12 * tflops
        speed *= shape.num_devices
        minutes = shape.steps * self.flops() / (_USED * speed) / 60
        texts = f"{shape.batch} rows of {shape.length} tokens"
        pieces = "" if shape.microbatches == 1 else f", in {shape.microbatches} pieces"
        lines = [f"{n / 2**30:8.2f} GiB  {name}" for name, n in memory.items()]
        return "\n".join(
            [
                *lines,
                f"{sum(memory.values()) / 2**30:8.2f} GiB  in all, roughly",
                f"head: {self.head_weights / 1e6:.1f} M weights, {self.head.num_layers} layers",
                f"training: {shape.steps} steps of {texts}{pieces}",
                f"time: roughly {minutes:.1f} minutes at {speed / 1e12:.3g} TFLOP/s, "
                "beside the answers",
            ]
        )


def active_weights(config: TargetConfig) -> int:
    """Weights of the layers that a token is multiplied with."""
    shapes = nnx.eval_shape(lambda: build(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    whole = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(shapes.layers)))
    if config.experts is None:
        return whole
    sparse = sum(map(config.is_sparse, range(config.num_layers)))
    of_expert = 3 * config.hidden_size * config.intermediate_size
    return whole - sparse * of_expert * (config.experts.num_experts - config.experts.top_k)


def target_weights(config: TargetConfig) -> int:
    return num_weights(lambda: build(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


def loss_chunk(vocab_size: int) -> int:
    """Rows whose logits exist at a time: 128 MiB in float32 for each of a few arrays."""
    return max(256, 2**25 // vocab_size)


def measured_speed() -> float:
    """FLOP/s of large products on the default device."""
    on_cpu = jax.devices()[0].platform == "cpu"
    n, dtype = (1024, jnp.float32) if on_cpu else (8192, jnp.bfloat16)
    x = jnp.ones((n, n), dtype)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.3:
        jax.block_until_ready(product(x))
        count += 1
    return 2 * n**3 * count / (time.perf_counter() - start)
