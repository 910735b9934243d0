"""The training loop of target and drafter: optimiser, schedule, checkpoints, curves.

Data, randomness and learning rate are functions of the step number. So a run that is killed and
restarted continues exactly where its last checkpoint left off.
"""

import json
import logging
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, muon
from tqdm import tqdm

from pallas_kernels import dispatch
from peagle_jax.cli import plotting
from peagle_jax.config import ConfigError
from peagle_jax.devices import Devices
from peagle_jax.parallel.partition import AXIS
from peagle_jax.training.budget import COMPILING_STEPS, Budget
from peagle_jax.training.curves import Curves, averages, flatten, plot
from peagle_jax.training.loggers import Logger, open_loggers

Params = dict[str, jax.Array]
"""Weights by path, `layers.0.attention.qkv.weight`."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Settings of one update of the weights.

    Args:
      learning_rate: peak for matrices; adam_learning_rate: peak for embeddings, heads and vectors.
      microbatches: pieces of a device's share of a batch, whose gradients are accumulated.
      num_devices: devices that share a batch; each holds all weights.
    """

    optimizer: Literal["muon", "adamw"]
    learning_rate: float
    adam_learning_rate: float
    weight_decay: float
    clip: float
    microbatches: int
    seed: int
    num_devices: int = 1


@dataclass(frozen=True, kw_only=True)
class RunConfig(UpdateConfig):
    """Length and settings of a run. Exactly one of `steps` and `minutes` is set.

    Args:
      decay: share of the run at its end in which the learning rate falls linearly to 0.
      patience: evaluations without a better one after which the cool-down begins; None: as many as
        there are.
      log_to: other places of the curves, see `loggers`.
    """

    out: Path
    steps: int | None
    minutes: float | None
    warmup: int
    decay: float
    log_every: int
    eval_every: int
    save_every: int
    patience: int | None = None
    log_to: tuple[str, ...] = ()

    def __post_init__(self):
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("say how long to train: either --steps or --minutes")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training task: parameters, data and loss.

    `loss(params, constants, batch, key)` returns `(loss_sum, (count, metrics))`; `metrics` maps
    names to (numerator, denominator), each a scalar or an array with one entry per depth.
    """

    params: Params  # float32 masters
    loss: Callable[..., tuple[jax.Array, tuple[jax.Array, dict]]]
    constants: Any
    batch: Callable[[int], Any]  # step -> numpy pytree, leading axis divisible by all pieces
    evaluate: Callable[[Params], dict[str, float]]
    tokens_per_step: int


def split_model(model: nnx.Module) -> tuple[Params, Callable[[Params], nnx.Module]]:
    """Trainable weights by path, and the function that inserts such weights into the model."""
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    leaves, tree = jax.tree.flatten_with_path(state)
    clean = lambda path: ".".join(str(getattr(p, "key", getattr(p, "idx", ""))) for p in path)
    names = [clean(path).removesuffix(".") for path, _ in leaves]

    def merge(params: Params) -> nnx.Module:
        return nnx.merge(graph, jax.tree.unflatten(tree, [params[n] for n in names]), rest)

    return {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}, merge


def cast(params: Params, dtype) -> Params:
    return {name: leaf.astype(dtype) for name, leaf in params.items()}


def _is_matrix(name: str, leaf: jax.Array) -> bool:
    return leaf.ndim == 2 and not name.startswith(("embed.", "lm_head."))


def _equal_matrices(params: Params) -> list[list[str]]:
    """Names of the inner matrices, grouped by shape."""
    groups: dict[tuple, list[str]] = {}
    for name, leaf in params.items():
        if _is_matrix(name, leaf):
            groups.setdefault(leaf.shape, []).append(name)
    return list(groups.values())


def _stacked(
    rule: optax.GradientTransformation, groups: list[list[str]]
) -> optax.GradientTransformation:
    """Applies `rule` to stacks [n, out, in] of equal matrices, each under its first name.

    Muon then runs a few batched products instead of many small ones."""
    inner = {name for group in groups for name in group}

    def stack(tree: Params) -> Params:
        rest = {name: leaf for name, leaf in tree.items() if name not in inner}
        return rest | {group[0]: jnp.stack([tree[name] for name in group]) for group in groups}

    def update(updates, state, params):
        updates, state = rule.update(stack(updates), state, stack(params))
        for group in groups:
            updates |= zip(group, updates[group[0]], strict=True)
        return updates, state

    return optax.GradientTransformation(lambda params: rule.init(stack(params)), update)


def make_optimizer(run: UpdateConfig, params: Params) -> optax.GradientTransformation:
    """Clipping, then Muon for inner matrices and AdamW for the rest, or AdamW for all.

    Muon's update is scaled to the size AdamW's would have (`consistent_rms`), so both learning
    rates mean the same thing. Weights are stored [out, in]; weight decay spares vectors.
    """
    matrices = {name: _is_matrix(name, leaf) for name, leaf in params.items()}
    decayed = {name: leaf.ndim == 2 for name, leaf in params.items()}
    if run.optimizer == "adamw":
        rule = optax.adamw(
            run.learning_rate, b1=0.9, b2=0.95, weight_decay=run.weight_decay, mask=decayed
        )
    else:
        axes = MuonDimensionNumbers(reduction_axis=2, output_axis=1)
        groups = _equal_matrices(params)
        for group in groups:
            for name in group[1:]:
                del matrices[name], decayed[name]
        rule = muon(
            run.learning_rate,
            weight_decay=run.weight_decay,
            weight_decay_mask=decayed,
            adam_b1=0.9,
            adam_b2=0.95,
            adam_weight_decay=0.0,
            adam_learning_rate=run.adam_learning_rate,
            muon_weight_dimension_numbers={n: axes if m else None for n, m in matrices.items()},
            consistent_rms=0.2,
        )
        rule = _stacked(rule, groups)
    return optax.chain(optax.clip_by_global_norm(run.clip), rule)


def schedule(step: int, total: int | None, *, warmup: int, decay: float) -> float:
    """Warm-up, stable, linear decay to 0: the factor on the peak learning rate at `step`.

    `total` None (not known yet) never decays.
    """
    rise = min(1.0, (step + 1) / max(1, warmup))
    if total is None:
        return rise
    return min(rise, max(0.0, (total - step) / max(1.0, decay * total)))


def make_step(loss: Callable, run: UpdateConfig, optimizer: optax.GradientTransformation):
    """The jitted update: `(params, opt_state, constants, batch, step, scale) -> (..., report)`;
    `loss` is as of `Task`."""
    M, N = run.microbatches, run.num_devices
    root = jax.random.key(run.seed)
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def accumulate(params, constants, batch, key):
        """Sums over a device's share of the batch; a piece has its number's key on any device."""
        if M * N == 1:
            return value_and_grad(params, constants, batch, key)
        device = jax.lax.axis_index(AXIS) if N > 1 else 0
        pieces = jax.tree.map(lambda x: x.reshape(M, -1, *x.shape[1:]), batch)
        first = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        shapes = jax.eval_shape(value_and_grad, params, constants, jax.tree.map(first, pieces), key)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def body(total, xs):
            piece, i = xs
            out = value_and_grad(params, constants, piece, jax.random.fold_in(key, i))
            return jax.tree.map(jnp.add, total, out), None

        return jax.lax.scan(body, zeros, (pieces, M * device + jnp.arange(M)))[0]

    if N > 1:
        summed = lambda *arguments: jax.lax.psum(accumulate(*arguments), AXIS)
        specs = (PartitionSpec(), PartitionSpec(), PartitionSpec(AXIS), PartitionSpec())
        sums = jax.shard_map(
            summed,
            mesh=Devices(N).mesh,
            in_specs=specs,
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    else:
        sums = accumulate

    @partial(jax.jit, donate_argnames=("params", "opt_state"))
    def train_step(params, opt_state, constants, batch, step, scale):
        key = jax.random.fold_in(root, step)
        with dispatch.references(rounded=True):  # kernels have no gradients
            (total, (count, metrics)), grads = sums(params, constants, batch, key)
        count = jnp.maximum(count, 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        # Updates are linear in the learning rate, weight decay included.
        updates = jax.tree.map(lambda u: scale * u, updates)
        report = dict(metrics, loss=(total, count), grad_norm=(optax.tree.norm(grads), 1.0))
        return optax.apply_updates(params, updates), opt_state, report

    return train_step


def _refuse_other_weights(out: Path, configs: dict[str, Any]) -> None:
    path = out / "train_config.json"
    if not (path.exists() and (out / "checkpoints").exists()):
        return
    before = json.loads(path.read_text())
    same = all(before.get(part) == configs.get(part) for part in ("model", "head"))
    if not same or before["run"]["optimizer"] != configs["run"]["optimizer"]:
        raise ConfigError(
            f"{out}/checkpoints has another model or optimizer; "
            "remove the folder or choose another --out"
        )


def write_provenance(out: Path, configs: dict[str, Any]) -> None:
    """`train_command.txt` (command, versions, commit, device) and `train_config.json`.

    Raises:
      ConfigError: the checkpoints under `out` have other weights than these configs.
    """
    out.mkdir(parents=True, exist_ok=True)
    _refuse_other_weights(out, json.loads(json.dumps(configs, default=str)))
    repository = Path(__file__).resolve().parents[2]
    git = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    packages = ("peagle-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tokenizers")

    def version(name):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    lines = [
        " ".join(["peagle-train", *sys.argv[1:]]),
        f"python {platform.python_version()}",
        *(f"{name} {version(name)}" for name in packages),
        f"commit {git.stdout.strip() or 'unknown'}",
        f"device {jax.devices()[0].device_kind} x {jax.device_count()}",
    ]
    (out / "train_command.txt").write_text("\n".join(lines) + "\n")
    (out / "train_config.json").write_text(json.dumps(configs, indent=2, default=str) + "\n")


def _checkpoints(out: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    return ocp.CheckpointManager((out / "checkpoints").absolute(), options=options)


class _Record:
    """Log of a run: curves, and the speed since the last row."""

    def __init__(self, task: Task, run: RunConfig, step: int, loggers: list[Logger]):
        self.task, self.run, self.loggers = task, run, loggers
        self.train, self.evaluation = (Curves(run.out / f"{n}.csv") for n in ("train", "eval"))
        for curves in (self.train, self.evaluation):
            curves.resume(step)
        self.pending: list[dict] = []
        self.draws = plotting.installed()
        if not self.draws:
            _log.warning("%s/curves.png is left out: %s", run.out, plotting.MISSING)
        self.restart(step)

    def restart(self, step: int) -> None:
        self.mark, self.mark_step = time.monotonic(), step

    def log(self, step: int, scale: float) -> dict[str, float]:
        row = dict(step=step, **averages(self.pending))
        seconds = max(time.monotonic() - self.mark, 1e-9)
        row["tokens_per_s"] = self.task.tokens_per_step * (step - self.mark_step) / seconds
        row["learning_rate"] = self.run.learning_rate * scale
        if not math.isfinite(row["loss"]):
            raise FloatingPointError(f"loss is {row['loss']} at step {step}; lower --learning-rate")
        self.train.add(row)
        for logger in self.loggers:
            logger("train", row)
        self.pending = []
        self.restart(step)
        return row

    def evaluate(self, step: int, params: Params) -> dict[str, float]:
        row = dict(step=step, **flatten(self.task.evaluate(params)))
        self.evaluation.add(row)
        for logger in self.loggers:
            logger("heldout", row)
        if self.draws:
            plot(self.train, self.evaluation, self.run.out / "curves.png")
        self.restart(step)
        return row

    def is_flat(self) -> bool:
        """Whether none of the last `patience` evaluations is better than those before."""
        key, sign = "acceptance_length", 1
        if key not in self.evaluation.names(key):
            key, sign = "loss", -1
        values = [sign * value for value in self.evaluation.column(key)[1]]
        patience = self.run.patience
        return (
            bool(patience)
            and len(values) > patience
            and (max(values[-patience:]) <= max(values[:-patience]))
        )


def _restore(manager: ocp.CheckpointManager, params: Params, opt_state):
    """(params, opt_state, step) of the newest checkpoint, or as given at step 0."""
    latest = manager.latest_step()
    if latest is None:
        return params, opt_state, 0
    state = dict(params=params, opt_state=opt_state)
    state = manager.restore(latest, args=ocp.args.StandardRestore(state))
    return state["params"], state["opt_state"], latest


def fit(task: Task, run: RunConfig) -> Params:
    """Trains to the end of the budget, resuming from the newest checkpoint under `run.out`."""
    run.out.mkdir(parents=True, exist_ok=True)
    optimizer = make_optimizer(run, task.params)
    train_step = make_step(task.loss, run, optimizer)
    devices = Devices(run.num_devices)
    constants = devices.copied(task.constants)
    # The step donates its inputs; the caller keeps its own copy.
    params = devices.copied(jax.tree.map(jnp.copy, task.params))
    budget = Budget(run.out, run.steps, run.minutes, run.decay)
    with _checkpoints(run.out) as manager, ExitStack() as stack:
        opt_state = devices.copied(optimizer.init(params))
        params, opt_state, step = _restore(manager, params, opt_state)
        loggers = stack.enter_context(open_loggers(run.log_to, run.out, step))
        record, compiled = _Record(task, run, step, loggers), step + COMPILING_STEPS
        interval = 0.5 if sys.stderr.isatty() else 10.0
        # Closed also by Ctrl-C: an open bar is drawn again below the message.
        with tqdm(total=budget.total, initial=step, unit="step", mininterval=interval) as bar:
            while budget.total is None or step < budget.total:
                scale = schedule(step, budget.total, warmup=run.warmup, decay=run.decay)
                params, opt_state, report = train_step(
                    params, opt_state, constants, task.batch(step), step, np.float32(scale)
                )
                record.pending.append(report)
                step += 1
                bar.update()
                budget.measure(step, partial(jax.block_until_ready, params))
                bar.total = budget.total
                last = step == budget.total
                saves = last or step % run.save_every == 0
                if saves or step % run.log_every == 0:  # no row spans a checkpoint
                    row = record.log(step, scale)
                    bar.set_postfix(loss=f"{row['loss']:.4f}", tok_s=f"{row['tokens_per_s']:.3g}")
                if last or step % run.eval_every == 0:
                    row = record.evaluate(step, _on_first(params))
                    shown = {k: round(v, 4) for k, v in row.items()}
                    bar.write(f"held out: {shown}", file=sys.stderr)
                    if not last and record.is_flat() and budget.cool_down(step):
                        line = f"no better since {run.patience} evaluations: cools down"
                        bar.write(f"{line} to step {budget.total}", file=sys.stderr)
                if saves:
                    state = dict(params=params, opt_state=opt_state)
                    manager.save(step, args=ocp.args.StandardSave(state))
                if step == compiled:
                    jax.block_until_ready(params)
                    record.restart(step)
        manager.wait_until_finished()
    return _on_first(params)


def _on_first(params: Params) -> Params:
    """The copies of the first device."""
    return {name: leaf.addressable_data(0) for name, leaf in params.items()}
