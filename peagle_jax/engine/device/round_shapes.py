"""The rounds that an engine compiles."""

from dataclasses import replace
from functools import partial

from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.engine.host.calls import RoundShape
from peagle_jax.engine.host.k_by_load import candidates


def round_shapes(config: EngineConfig, platform: str) -> tuple[RoundShape, ...]:
    """Shapes of all rounds, in the order in which they compile: first one round of each batch
    bucket, the largest bucket in front, because its round serves any number of requests.

    Args:
      platform: as `pallas_kernels.device.Device.platform`.
    """
    sizes = config.batch_buckets[::-1]
    shapes = [RoundShape(size, config.num_draft) for size in sizes]
    if config.adaptive != "off":
        drafts = partial(candidates, config.num_draft, platform=platform)
        for size in sizes:
            shapes += [RoundShape(size, k) for k in drafts(size=size)]
    return tuple(dict.fromkeys(shapes))


_MOST_GREEDY = 64
"""In larger batches the device takes longer than the host, so branches cost no time. Light models,
whose calls run several rounds, are not subject to this limit."""


_LIGHT = 2**30
"""Bytes of weights of target and head below which a round takes the device less time than the
host."""

_MANY = 4
"""Rounds in a call then: about 2 ms. More of them relieve the host, but requests wait longer for a
slot, tokens reach streams in larger groups, and rounds after the end of a text are wasted."""


def rounds_per_call(config: EngineConfig, platform: str, weights_bytes: int) -> int:
    """Rounds that a call of a greedy batch runs, if `config.rounds_per_call` does not say: `_MANY`
    on a GPU with a light model, where the options allow it, else 1. It is 1 on several devices too:
    more was not measured there.

    Args:
      platform: as of `round_shapes`.
      weights_bytes: size of target and head.
    """
    is_light = weights_bytes < _LIGHT and config.tensor_parallel == 1
    if platform != "cuda" or not is_light:
        return 1
    try:
        replace(config, rounds_per_call=_MANY)
    except ConfigError:
        return 1
    return _MANY


def greedy_shapes(config: EngineConfig, platform: str) -> tuple[RoundShape, ...]:
    """Shapes that also have a program for batches of greedy requests, in the order in which they
    compile.

    Only the first round of each batch bucket has one: another program for each K would double the
    time to compile them all. `greedy_rounds` None compiles them where a call runs several rounds,
    and on GPUs for plain decoding, where the host decides the time of one request's round. With
    drafts they win less than 1 % of a large model's round (docs/adaptive.md, "Candidates").
    """
    wanted = config.greedy_rounds
    if wanted is None:
        is_plain = platform == "cuda" and config.num_draft == 0
        wanted = is_plain or config.repeat > 1
    if not wanted:
        return ()
    most = _MOST_GREEDY if config.repeat == 1 else config.max_num_seqs
    sizes = (size for size in config.batch_buckets[::-1] if size <= most)
    return tuple(RoundShape(size, config.num_draft) for size in sizes)
