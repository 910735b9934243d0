"""Curves in TensorBoard and Weights & Biases, beside the files of `curves`."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from peagle_jax.config import ConfigError
from peagle_jax.extras import check_installed

LOGGERS = ("tensorboard", "wandb")
Logger = Callable[[str, dict[str, float]], None]
"""Called with "train" or "heldout", and a row of `Curves`."""


def check_loggers(names: Sequence[str]) -> None:
    """Raises ConfigError if the package of a logger is not installed."""
    if "tensorboard" in names:
        check_installed("tensorboard", "--log-to tensorboard")
    if "wandb" in names and find_spec("wandb") is None:
        raise ConfigError("--log-to wandb needs wandb: pip install wandb")


@contextmanager
def open_loggers(names: Sequence[str], out: Path, step: int) -> Iterator[list[Logger]]:
    """The loggers of a run in `out`, which goes on at `step`: later rows of it are replaced."""
    with ExitStack() as stack:
        openers = {"tensorboard": _tensorboard, "wandb": _wandb}
        yield [stack.enter_context(openers[name](out, step)) for name in names]


@contextmanager
def _tensorboard(out: Path, step: int) -> Iterator[Logger]:
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(out / "tensorboard"), purge_step=step + 1) as writer:

        def log(part: str, row: dict[str, float]) -> None:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(f"{part}/{name}", value, row["step"])

        yield log


@contextmanager
def _wandb(out: Path, step: int) -> Iterator[Logger]:
    import wandb

    name = f"{out.resolve().parent.name}-{out.name}"
    same = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]  # as of a run that goes on
    options = dict(project="peagle-jax", name=name, id=same, resume="allow", dir=str(out))
    with wandb.init(**options) as run:

        def log(part: str, row: dict[str, float]) -> None:
            values = {f"{part}/{name}": value for name, value in row.items() if name != "step"}
            run.log(values, step=int(row["step"]))

        yield log
