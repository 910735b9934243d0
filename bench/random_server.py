"""`peagle-serve` on a full-size model with random weights, and its engine without the service.

`python -m bench.random_server --preset NAME OPTIONS`; OPTIONS are those of peagle-serve. What the
model is made of goes by an environment variable to the process that makes the engine. The process
that loads the server must not use the device, whose memory the server holds, so the bare engine has
a process of its own too.
"""

import argparse
import json
import multiprocessing
import os
import string
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.command import PRESET_SUFFIX, check_preset
from bench.presets import preset
from peagle_jax.config import ConfigError
from peagle_jax.presets import PRESETS
from peagle_jax.sampling_params import SamplingParams
from serving.settings import Settings
from serving.sources import resolve

if TYPE_CHECKING:
    from peagle_jax import Engine

_VARIABLE = "BENCH_RANDOM_MODEL"
_NUM_BYTES = 256
_CHAT_TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """What a server with random weights is made of; fields as in the options of `decode-step`.

    `tokenizer` is a folder with a tokenizer.json; without it only token ids are served.
    """

    preset: str
    layers: int | None = None
    synthetic_acceptance_length: float | None = None
    seed: int = 0
    tokenizer: str | None = None

    @property
    def options(self) -> list[str]:
        """As options of this module's command."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


def make_engine(settings: Settings) -> "Engine":
    """The engine of the settings with the model that the environment describes; raises as
    `random_engine` does."""
    return random_engine(RandomModel(**json.loads(os.environ[_VARIABLE])), settings)


def random_engine(model: RandomModel, settings: Settings, num_pages: int | None = None) -> "Engine":
    """An engine as `serving.engines.make_engine` makes it, with random weights; not yet warm.

    Args:
      num_pages: pages of the KV cache; None takes what fits.

    Raises:
      ConfigError: settings of models in folders, or a model that cannot be made.
    """
    # Imported here: the process that serves the ports needs no jax.
    from bench.models import Models
    from bench.synthetic import Scattered, synthetic_acceptance
    from peagle_jax.models.weight_order import order_weights
    from peagle_jax.text.tokenizer import Tokenizer
    from serving.engines import engine_of, sized_config

    for name in ("model", "drafter", "quantization"):
        if getattr(settings, name) is not None:
            raise ConfigError(f"--{name} is for models in folders: leave it out beside --preset")
    config, method = sized_config(settings), settings.method or "peagle"
    if num_pages is not None:
        config = replace(config, num_pages=num_pages)
    made = Models.random(
        preset(model.preset, model.layers),
        [method],
        dtype=config.dtype,
        seed=model.seed,
        num_devices=settings.tensor_parallel,
    )
    order_weights(made.target, config.activations)
    head, drafter, accept = made.heads.get(method), None, None
    if head is not None and config.num_draft:
        drafter = made.drafter(method, config.num_draft, config.draft_sampling)
        drafter = Scattered(drafter, made.target.config.vocab_size, config.num_draft)
        if model.synthetic_acceptance_length is not None:
            accept = synthetic_acceptance(model.synthetic_acceptance_length, config.num_draft)
    tokenizer = None if model.tokenizer is None else Tokenizer(model.tokenizer)
    return engine_of(
        settings, config, made.target, head, tokenizer=tokenizer, drafter=drafter, accept=accept
    )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Requests of a load, as `load_clients.Call` has them.

    Args:
      warm_up: the same, fewer or shorter, before the time counts.
      concurrency: requests at once; None gives each to the engine at its start.
      starts: seconds after the beginning.
    """

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    warm_up: Sequence[SamplingParams]
    concurrency: int | None
    starts: Sequence[float] | None = None


def in_child(function: Callable, *arguments) -> Any:
    """The result of a function in a process of its own, which has ended when this returns or
    raises.

    Raises:
      ConfigError: the process ended without a result.
      Exception: what the function raised.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_send, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError as error:
        raise ConfigError("the process of the bare engine ended without a result") from error
    finally:
        process.kill()
        process.join()
    if isinstance(result, Exception):
        raise result
    return result


def _send(pipe: Connection, function: Callable, arguments: tuple) -> None:
    try:
        pipe.send(function(*arguments))
    except Exception as error:  # the first process raises it
        pipe.send(error)


def measure_bare(
    model: RandomModel, options: Sequence[str], num_pages: int, cells: Sequence[Cell]
) -> list[dict]:
    """Fields of `Measurement.as_row` for each cell, and the tokens of all texts as `outputs`.

    Args:
      options: of the server.
      num_pages: of the server. Its number is a shape of every program, and free memory differs
        from start to start.
    """
    from bench.timing import drive
    from peagle_jax.cli import runs

    settings, _ = resolve(options)
    if not settings.no_cache:
        folder = runs.keep_compiled_programs(os.environ.get("XDG_CACHE_HOME"))
        settings = replace(settings, programs_folder=folder)
    engine = random_engine(model, settings, num_pages)
    runs.warm_up(engine)
    found = []
    for cell in cells:
        at_once = cell.concurrency or len(cell.prompts)
        drive(engine, cell.prompts, cell.warm_up, concurrency=at_once)
        driven = drive(engine, cell.prompts, cell.params, concurrency=at_once, starts=cell.starts)
        found.append(driven.as_row() | {"outputs": driven.outputs})
    return found


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a chat template and tokenizer.json: the bytes, then made-up tokens of a few letters,
    every second with a space in front.

    A text is encoded byte by byte; each id has a text of its own, so that decoding is the work of a
    real model.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spaced = ["", "\u0120"]  # the space of byte-level tokenizers
    tokens = [*alphabet, *(spaced[i % 2] + _letters(i) for i in range(_NUM_BYTES, vocab_size))]
    vocab = {token: i for i, token in enumerate(tokens[:vocab_size])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")


def _letters(number: int) -> str:
    """A number in base 26."""
    found = ""
    while number:
        number, place = divmod(number, len(string.ascii_lowercase))
        found = string.ascii_lowercase[place] + found
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    from serving.__main__ import main as serve

    parser = argparse.ArgumentParser(prog="bench.random_server", allow_abbrev=False)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--synthetic-acceptance-length", type=float)
    parser.add_argument("--seed", type=int, default=0)
    own, options = parser.parse_known_args(arguments)
    try:
        check_preset(own.preset)
    except ConfigError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), PRESETS[own.preset.removesuffix(PRESET_SUFFIX)].vocab_size)
        model = RandomModel(**vars(own), tokenizer=folder)
        os.environ[_VARIABLE] = json.dumps(asdict(model))
        return serve(["--served-model-name", own.preset, *options], make_engine=make_engine)


if __name__ == "__main__":
    # By its name, so that another process finds `make_engine` in the module and not in `__main__`.
    from bench import random_server

    sys.exit(random_server.main())
