"""Memory plan of an engine: how many KV pages fit, computed before anything is allocated.

With several devices all numbers are those of one of them.
"""

import gc
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from pallas_kernels import dispatch
from peagle_jax.config import (
    AttentionConfig,
    ConfigError,
    DrafterConfig,
    EngineConfig,
    TargetConfig,
)
from peagle_jax.devices import Devices, first_devices
from peagle_jax.engine.device.round_shapes import round_shapes
from peagle_jax.engine.host.prefill_shapes import prefill_shapes
from peagle_jax.engine.host.stats import DeviceMemory
from peagle_jax.method.adjust import slot_bytes
from peagle_jax.method.plan import mask_words
from peagle_jax.method.prompt_scores import BLOCK
from peagle_jax.models.cache import ring_rows
from peagle_jax.parallel.shares import local_attention, vocabulary_rows

_log = logging.getLogger(__name__)

_SHARE = 0.85  # of free memory goes to KV caches; the rest is for activations and programs
_EXPECTED_POOL = 0.95  # of jax's limit; a smaller pool has a reason that the user should know

_MOST_SAVED, _SAVED_BYTES = 64, 2**28
"""Default number of saved rings: at most 64, in at most 256 MiB."""
_SAVED_SHARE = 0.05  # of free memory, at most

_HOLES = {256: 64, 1024: 64, 4096: 64, 2**14: 16, 2**16: 16, 2**18: 8, 2**20: 8}
"""Holes to carve: {size in bytes: count}, 12 MB in all."""


def carve_holes(num_devices: int) -> list[jax.Array]:
    """Reserves small free blocks in each device's memory for small arrays. Keep the returned arrays
    alive.

    XLA keeps a program's temporaries in one large block, which is free between calls. The allocator
    is best-fit: without smaller free blocks, a small array would split the large block. The
    temporaries then move, and the driver must update every node of the CUDA graph. (Four layers of
    the 30B model on an H200: 1.92 ms a round without holes, 1.32 ms with them.) Each hole lies
    between two live one-byte arrays, so the allocator cannot merge it with its neighbours.
    """
    sizes = [size for size, count in _HOLES.items() for _ in range(count)]
    put = lambda count, device: jax.device_put(np.zeros(count, np.int8), device)
    devices = first_devices(num_devices)
    pairs = [(put(size, device), put(1, device)) for device in devices for size in sizes]
    jax.block_until_ready(pairs)
    for hole, _ in pairs:
        hole.delete()
    return [kept for _, kept in pairs]


@dataclass(frozen=True)
class DeviceSummary:
    """What the sizes of an engine depend on of its devices.

    Attributes:
      platform: as `pallas_kernels.device.Device.platform`.
      free_bytes: least free memory of a device; None where the platform does not report it.
      uses_host_memory: whether that is the host's memory, which other programs need too.
      gather: how several devices exchange small arrays, as `EngineConfig.gather`.
    """

    platform: str
    free_bytes: int | None
    uses_host_memory: bool = False
    gather: Literal["library", "peers"] = "library"


def summary_of(devices: Devices) -> DeviceSummary:
    """Reads what is free on the devices now."""
    return DeviceSummary(
        platform=dispatch.platform(),
        free_bytes=free_bytes(devices.count),
        uses_host_memory=dispatch.default_device().platform == "cpu",
        gather="peers" if devices.peers else "library",
    )


def _layers(target: TargetConfig, drafter: DrafterConfig | None) -> list[AttentionConfig]:
    models = [target] if drafter is None else [target, drafter]
    return [model.attention(i) for model in models for i in range(model.num_layers)]


def windows_of(target: TargetConfig, drafter: DrafterConfig | None) -> set[int]:
    """Sizes of the sliding windows in the layers of target and drafter."""
    return {layer.window for layer in _layers(target, drafter)} - {None}


def _token_bytes(layer: AttentionConfig, config: EngineConfig) -> int:
    itemsize = jax.numpy.dtype(config.cache_dtype).itemsize
    layer = local_attention(layer, config.tensor_parallel)
    return 2 * itemsize * layer.num_kv_heads * layer.head_dim


def page_bytes(target: TargetConfig, drafter: DrafterConfig | None, config: EngineConfig) -> int:
    """Bytes of one page over all layers of target and drafter with full attention."""
    layers = (layer for layer in _layers(target, drafter) if layer.window is None)
    return config.page_size * sum(_token_bytes(layer, config) for layer in layers)


def pages_in(
    nbytes: int, target: TargetConfig, drafter: DrafterConfig | None, config: EngineConfig
) -> int:
    """Pages that a KV cache of `nbytes` bytes has, the dummy page included.

    Raises:
      ConfigError: they cannot hold one request; `field` is "kv_cache_memory", the rule has the
        least bytes.
    """
    size, least = page_bytes(target, drafter, config), config.pages_per_seq + 1
    if nbytes < least * size:
        given = (
            f"{nbytes} bytes cannot hold one request of max_model_len={config.max_model_len} tokens"
        )
        rule = f"{given}; give {least * size} bytes or more, or lower max_model_len"
        raise ConfigError.of("kv_cache_memory", rule)
    if size == 0:  # every layer has a sliding window, so pages hold nothing
        return config.total_pages
    return nbytes // size


def ring_bytes(target: TargetConfig, drafter: DrafterConfig | None, config: EngineConfig) -> int:
    """Bytes of the ring buffers of all sliding-window layers; independent of sequence lengths."""
    return ring_rows(config) * _slot_ring_bytes(target, drafter, config)


def _slot_ring_bytes(
    target: TargetConfig, drafter: DrafterConfig | None, config: EngineConfig
) -> int:
    """Bytes of the ring buffers of one slot."""
    tokens = lambda window: config.ring_pages(window) * config.page_size
    layers = (layer for layer in _layers(target, drafter) if layer.window is not None)
    return sum(tokens(layer.window) * _token_bytes(layer, config) for layer in layers)


def has_long_prefills(
    target: TargetConfig, drafter: DrafterConfig | None, config: EngineConfig
) -> bool:
    """`long_prefills` of the config, else whether there are small prefills and no sliding windows.

    Raises:
      ConfigError: they are asked for, and a layer has a window, whose ring holds the rows of one
        chunk only.
    """
    has_windows = bool(windows_of(target, drafter))
    if config.long_prefills and has_windows:
        raise ConfigError.of("long_prefills", "a layer has a sliding window; leave it out")
    return (
        config.small_prefills and not has_windows
        if config.long_prefills is None
        else config.long_prefills
    )


def saved_bytes(target: TargetConfig, drafter: DrafterConfig | None, config: EngineConfig) -> int:
    """Bytes of the saved rings; part of `ring_bytes`."""
    return (config.saved_rings or 0) * _slot_ring_bytes(target, drafter, config)


def fit_rings(
    target: TargetConfig, drafter: DrafterConfig | None, config: EngineConfig, free: int | None
) -> int:
    """Number of saved rings: `saved_rings` of the config, else what `_SAVED_BYTES` hold, at most
    `_SAVED_SHARE` of the `free` bytes of a device.

    0 without sliding windows or without a prefix cache.
    """
    one = _slot_ring_bytes(target, drafter, config)
    if one == 0 or not config.prefix_caching:
        return 0
    if config.saved_rings is not None:
        return config.saved_rings
    number = min(_MOST_SAVED, _SAVED_BYTES // one)
    # Halves, because a shape that changes from start to start would be compiled again.
    while number and free is not None and number * one > _SAVED_SHARE * free:
        number //= 2
    return number


def control_bytes(target: TargetConfig, config: EngineConfig, platform: str) -> int:
    """Bytes of the sampling controls of all slots, and of the masks of all programs."""
    slot = slot_bytes(target.vocab_size)
    rounds = sum(shape.size * (shape.num_draft + 1) for shape in round_shapes(config, platform))
    prefills = sum(shape.rows for shape in prefill_shapes(config))
    prefills += config.prefill_rows * config.prompt_logprobs
    masks = 4 * (rounds + prefills) * mask_words(target.vocab_size)
    return (config.max_num_seqs + 1) * slot + masks


def draft_bytes(target: TargetConfig, config: EngineConfig) -> int:
    """Bytes in a state of the drafts' distributions, where they are sampled."""
    if config.draft_sampling != "sample":
        return 0
    width = vocabulary_rows(target.vocab_size, config.tensor_parallel)
    return 4 * (config.max_num_seqs + 1) * config.num_draft * width


def free_bytes(num_devices: int) -> int | None:
    """Least free memory of the devices in bytes; None when the platform does not report it.

    A server collects no garbage while it starts. Arrays that only dead cycles hold, such as
    replaced weights, are freed first then: they would count as used.
    """
    if not gc.isenabled():
        gc.collect()
    devices = first_devices(num_devices)
    stats = [device.memory_stats() for device in devices]
    if all(stats):
        return min(_usable_bytes(device) - device["bytes_in_use"] for device in stats)
    if devices[0].platform != "cpu":
        return None
    free = free_host_bytes()
    return None if free is None else free // len(devices)  # they share the host's memory


def device_memory(num_devices: int) -> dict[int, DeviceMemory]:
    """By rank, of the devices whose platform reports it; a CPU does not."""
    memory = {}
    for rank, device in enumerate(first_devices(num_devices)):
        if stats := device.memory_stats():
            names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
            memory[rank] = DeviceMemory(*(stats[name] for name in names))
    return memory


def _usable_bytes(stats: dict[str, int]) -> int:
    """Bytes of a device that jax can allocate, given the device's memory statistics.

    On a GPU jax allocates its pool at the start, and a smaller one than its limit if other
    processes use the device. jaxlib 0.11 aborts the process where it would have to extend such a
    pool.
    """
    limit, pool = stats["bytes_limit"], stats.get("pool_bytes", 0)
    grows = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0")
    if grows or not 0 < pool < limit:
        return limit
    if pool < _EXPECTED_POOL * limit:
        _log.warning(
            "jax got %.1f of %.1f GB of device memory: another process uses the device",
            pool / 1e9,
            limit / 1e9,
        )
    return pool


def free_host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Available host memory in bytes: free memory plus reclaimable file cache (MemAvailable)."""
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _call_bytes(target: TargetConfig, config: EngineConfig, platform: str) -> int:
    """Lower bound on the temporaries of one call: the larger of a round's float32 logits and one
    layer's prefill activations."""
    rows = max(shape.size * (shape.num_draft + 1) for shape in round_shapes(config, platform))
    rows = max(rows, BLOCK if config.prompt_logprobs else 0)
    logits = 4 * rows * vocabulary_rows(target.vocab_size, config.tensor_parallel)
    if (config.draft_sampling, config.verify_method) == ("sample", "block"):
        logits *= 3  # the target's distributions and the residuals are as large
    width = 2 * target.hidden_size + target.intermediate_size
    itemsize = jax.numpy.dtype(config.dtype).itemsize
    return max(logits, itemsize * config.prefill_rows * config.prefill_chunk * width)


def _needs(
    target: TargetConfig, drafter: DrafterConfig | None, config: EngineConfig, platform: str
) -> dict[str, int]:
    """Minimum bytes the engine needs, by purpose."""
    pages = config.pages_per_seq + 1 if config.num_pages is None else config.num_pages
    return {
        "KV pages": pages * page_bytes(target, drafter, config),
        "layers with a sliding window": ring_bytes(target, drafter, config),
        "sampling controls": control_bytes(target, config, platform),
        "drafts": draft_bytes(target, config),
        "one call": _call_bytes(target, config, platform),
    }


def _has_room(needs: dict[str, int], free: int) -> bool:
    *kept, call = needs.values()
    return sum(kept) <= int(free * _SHARE) and sum(kept) + call <= free


_MOST_ON_CPU = 4
"""On a CPU the prefix cache leaves memory to other programs: most pages, in worst cases of the
slots."""

_ARRAY_BYTES = 2**31
"""Keys, or values, of one layer stay below: XLA and the kernels may count bytes in int32."""


def _most_pages(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    config: EngineConfig,
    *,
    uses_host_memory: bool,
) -> int:
    """Number of pages that an engine can use, if memory is no limit."""
    if config.num_pages is not None or not config.prefix_caching:
        return config.total_pages
    if uses_host_memory:
        return _MOST_ON_CPU * (config.total_pages - 1) + 1
    layers = [layer for layer in _layers(target, drafter) if layer.window is None]
    widest = max(_token_bytes(layer, config) for layer in layers) // 2  # keys and values
    return max(config.total_pages, (_ARRAY_BYTES - 1) // (config.page_size * widest))


def _steady(pages: int) -> int:
    """The number with its first seven binary digits, at most 1.6 % smaller.

    Free memory differs by some kilobytes from start to start. The number of pages is a shape of
    every program, so a start with another number would find no compiled program in the persistent
    cache.
    """
    step = 1 << max(0, pages.bit_length() - 7)
    return pages - pages % step


def fit_pages(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    config: EngineConfig,
    devices: DeviceSummary,
) -> int:
    """Number of pages to allocate: `num_pages` of the config, else what fits and is of use.

    All slots can use `total_pages`. The prefix cache uses more: on a GPU all that fits.

    Raises:
      ConfigError: memory is too small for `num_pages` (by default: the pages of one request of
        `max_model_len` tokens) or for the temporaries of one call. The message gives the largest
        sizes that fit.
    """
    size, free = page_bytes(target, drafter, config), devices.free_bytes
    if free is None:
        return config.total_pages
    needs = _needs(target, drafter, config, devices.platform)
    if _has_room(needs, free):
        if size == 0:  # every layer has a sliding window
            return config.total_pages
        _, *others, call = needs.values()
        room = min(int(free * _SHARE), free - call) - sum(others)
        most = _most_pages(target, drafter, config, uses_host_memory=devices.uses_host_memory)
        if room // size >= most:
            return most
        return max(config.pages_per_seq + 1, _steady(room // size))
    parts = ", ".join(f"{nbytes:,} for {what}" for what, nbytes in needs.items() if nbytes)
    raise ConfigError(
        f"not enough memory: of {free:,} free bytes are needed {parts}; "
        f"{_advice(target, drafter, config, devices)}"
    )


def _advice(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    config: EngineConfig,
    devices: DeviceSummary,
) -> str:
    """The largest value of each size option that fits while the others keep their values."""

    def fits(name: str, value: int) -> bool:
        changed = replace(config, **{name: value})
        needs = _needs(target, drafter, changed, devices.platform)
        return _has_room(needs, devices.free_bytes)

    def largest(name: str, least: int) -> int | None:
        # Memory grows monotonically with each option: bisect.
        low, high = least - 1, getattr(config, name)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(name, middle) else (low, middle)
        return low if low >= least else None

    options, names = [], ["--max-model-len", "--max-num-seqs"]
    if config.num_pages is not None:
        names.insert(0, "num_pages (--kv-cache-memory)")
        if pages := largest("num_pages", config.pages_per_seq + 1):
            size = pages * page_bytes(target, drafter, config)
            options.append(f"num_pages={pages} (--kv-cache-memory {size}B)")
    for name in ("max_model_len", "max_num_seqs", "prefill_chunk"):
        if value := largest(name, 1):
            options.append(f"--{name.replace('_', '-')} {value}")
    return f"what fits is {' or '.join(options)}" if options else f"lower {' and '.join(names)}"
