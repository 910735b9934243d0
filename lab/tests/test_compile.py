"""Every kernel compiles for every chip that it is made for, and a round launches them as one graph.

There need be no GPU: see `lab.deviceless`, which is run once for a chip, and
`lab.deviceless_round`.
"""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab import deviceless
from pallas_kernels.moe.mosaic_norm_send import Sizes

# The first test of a chip compiles all of its kernels: minutes on two cores.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
_ROOT = Path(__file__).parents[2]


def run(module: str, chip: str, folder: Path, *options: str) -> Any:
    """What a command left in its `--json`, run in a process of its own: Mosaic takes one chip."""
    found = folder / "found.json"
    process = subprocess.run(
        [sys.executable, "-m", module, "--chip", chip, "--json", found, "--dump", folder, *options],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if not found.is_file():
        log = folder / "stderr.txt"
        said = log.read_text() if log.is_file() else ""
        pytest.fail(f"exit code {process.returncode}\n{process.stderr}\n{said}"[-4000:])
    return json.loads(found.read_text())


def on(chip: str, *others, marks=()):
    """Parameters of a test; with `--dist loadgroup` those of a chip alone share a worker."""
    names = map(str, (chip, *others))
    return pytest.param(chip, *others, id="@" * (not others) + "-".join(names), marks=marks)


MOST = 2
"""Specs of an operation to compile, spread over its list. `spread` adds those of kernels, weight
formats and head dims that these lack. `python -m lab.deviceless --chip CHIP --op OP` compiles all.
"""
SPILLS = {
    ("h200", "verify_attention", "qwen3-moe-prefill"): 48,
    ("h200", "verify_attention", "llama-8b-prefill"): 40,
    ("h200", "verify_attention", "gpt-oss-prefill"): 128,
    ("h200", "verify_attention", "gpt-oss-prefill-long"): 128,
}
"""Bytes that a kernel may spill: prefill with pages of 16 tokens spills before its loop."""


@functools.cache
def compiled(chip: str, folder: Path) -> list[dict]:
    """The kernels of all operations."""
    return run("lab.deviceless", chip, folder / chip, f"--most={MOST}")


# The compiler of B300 takes the kernels of B200.
_CHIPS = [
    on(chip, marks=pytest.mark.exhaustive if chip == "b300" else ()) for chip in deviceless.CHIPS
]


@pytest.mark.parametrize("chip", _CHIPS)
@pytest.mark.parametrize("op", deviceless.ops())
def test_kernels_compile(op, chip, tmp_path_factory):
    if lacking := deviceless.missing():
        pytest.skip(lacking)
    specs, sm = deviceless.specs_of(op), deviceless.CHIPS[chip].sm
    if not deviceless.specs_on(op, deviceless.CHIPS[chip]):
        pytest.skip(f"{op} has no kernel for {chip}")
    kernels = [one for one in compiled(chip, tmp_path_factory.getbasetemp()) if one["op"] == op]
    wanted = deviceless.spread(deviceless.specs_on(op, deviceless.CHIPS[chip]), MOST)
    assert wanted
    assert {one["spec"] for one in kernels} == wanted.keys()
    wrong = [complaint for one in kernels if (complaint := complaint_about(one))]
    assert not wrong, "\n".join(wrong)
    for name, spec in wanted.items():
        if mma := getattr(spec, "mma", specs.MMA).get(sm):  # one without may say so itself
            kinds = [kind for one in kernels if one["spec"] == name for kind in one["mma"]]
            assert any(re.match(mma, kind) for kind in kinds), f"{name} has {kinds or 'none'}"


BARRIERS = 1024
"""Bytes of shared memory that barriers may take; `smem` does not count them."""


def complaint_about(kernel: dict) -> str | None:
    if kernel["error"]:
        what = kernel["error"]
    elif kernel["spills"] > SPILLS.get((kernel["chip"], kernel["op"], kernel["spec"]), 0):
        what = f"{kernel['spills']} bytes spilled"
    elif kernel["registers"] > kernel["max_registers"]:
        what = f"{kernel['registers']} registers, more than {kernel['max_registers']}"
    elif kernel["smem"] + BARRIERS > deviceless.CHIPS[kernel["chip"]].smem_bytes:
        what = (
            f"{kernel['smem']} bytes of shared memory, and barriers: more than a thread block has"
        )
    else:
        return None
    return f"{kernel['op']} {kernel['spec']} {kernel['name']}: {what}"


_SENT = {
    "qwen3-moe-norm-route-8": (Sizes(8, 2048, 8), 3),
    "norm-route-16-of-8-parts": (Sizes(16, 2048, 16), 3),
    "qwen3-moe-norm-product-64": (Sizes(64, 2048, 8), 2),
    "qwen3-moe-norm-product-128": (Sizes(128, 2048, 16), 2),
}
"""Messages of each spec."""


def _places(lines: list[str], text: str, first: int = 0) -> list[int]:
    """Which of the lines from the first on have the text."""
    return [i for i, line in enumerate(lines) if i >= first and text in line]


@pytest.mark.parametrize("chip", [on("h200")])
def test_blocks_of_a_cluster_send_when_the_receiver_has_armed(chip, tmp_path):
    """The order of `cluster_send`'s PTX in kernels with a norm. With these numbers of rows every
    block norms rows."""
    if lacking := deviceless.missing():
        pytest.skip(lacking)
    names = [f"--spec={name}" for name in _SENT]
    found = run("lab.deviceless", chip, tmp_path / "dump", "--op=moe", *names)
    assert [one["spec"] for one in found] == list(_SENT)
    number_of = lambda file: int(file.stem.rsplit("_", 1)[1])
    files = sorted((tmp_path / "dump").glob("*.ptx"), key=number_of)
    for file, (sizes, messages) in zip(files, _SENT.values(), strict=True):
        lines = file.read_text(encoding="utf-8").splitlines()
        places = functools.partial(_places, lines)
        inits = places("@first mbarrier.init")
        counts = places("@first mbarrier.arrive.expect_tx")
        fence = places("fence.mbarrier_init.release.cluster", inits[0])[0]
        arrive = places("barrier.cluster.arrive", inits[0])[0]
        (begun,) = places("barrier.cluster.wait.acquire")
        sends, receives = places("st.async"), places("mbarrier.try_wait.parity.acquire.cluster")
        order = [*inits, *counts, fence, arrive, begun, sends[0], receives[0]]
        assert order == sorted(order)
        assert len(inits) == len(receives) == messages
        # Threads have stored the rows, and the tensor cores read them through another proxy.
        product = places("wgmma.mma_async")[0]
        assert any(receives[0] < i < product for i in places("fence.proxy.async"))
        expected = [re.search(r"\+ (\d+)\], (\d+);", lines[i]).groups() for i in counts]
        received = sizes.received[:messages]
        assert expected == [(str(8 * i), str(size)) for i, size in enumerate(received)]


ROUNDED = ("per-row-wide-4096", "llama-8b-one", "llama-8b-many")
"""A product with scales of rows; rotations of several parts, and of one."""


@pytest.mark.parametrize("chip", [on("h200"), on("b200")])
def test_products_are_rounded_before_they_are_added(chip, tmp_path):
    """See `rounded_product`: the scale of a row and the sum of a chunk, and rotations. Interpreters
    never fuse."""
    if lacking := deviceless.missing():
        pytest.skip(lacking)
    options = ("--op=block_gemm", "--op=rope_write", *(f"--spec={name}" for name in ROUNDED))
    run("lab.deviceless", chip, tmp_path / "dump", *options)
    files = list((tmp_path / "dump").glob("*.ptx"))
    assert len(files) == len(ROUNDED)
    for file in files:
        code = file.read_text(encoding="utf-8")
        operations = re.findall(r"\b(?:fma|mul)\.(?:rn\.)?f32(?:x2)?\b", code)
        assert set(operations) == {"mul.rn.f32"}, file.name


@pytest.mark.parametrize(
    ("chip", "cache", "activations"),
    [
        on("h200", "auto", "bf16", marks=pytest.mark.exhaustive),
        on("h200", "fp8", "bf16"),
        on("b200", "auto", "bf16"),
        on("b200", "auto", "fp8"),
    ],
)
def test_a_round_is_one_graph_that_copies_no_weight_and_no_cache(
    chip, cache, activations, tmp_path
):
    """Two layers of Qwen3-Coder-30B in fp8, at full width, and a head of one layer."""
    if lacking := deviceless.missing():
        pytest.skip(lacking)
    sizes = ("--layers=2", "--k=3", "--concurrency=8")
    formats = (f"--kv-cache-dtype={cache}", f"--activations={activations}")
    made = run("lab.deviceless_round", chip, tmp_path, *sizes, *formats)
    assert (made["graphs"], made["outside"]) == (1, {})
    assert made["largest_copy"] < made["smallest_matrix"]
    assert made["aliased_bytes"] >= made["cache_bytes"]
    assert made["spills"] == 0
    ours = {"block_gemm", "rms_norm", "add_rms_norm", "rope_write", "verify_attention"}
    assert made["mosaic"].keys() >= {*ours, "moe_gate_up"}
    assert ("quantize" in made["mosaic"]) == (activations == "fp8")


@pytest.mark.parametrize(
    ("chip", "count"),
    [
        on("h200", 2),
        *(on(chip, 1, marks=pytest.mark.exhaustive) for chip in ("h200", "b200")),
    ],
)
def test_several_rounds_in_a_call_copy_no_weight_and_no_cache(chip, count, tmp_path):
    """Nor a slice of stacked weights; with two devices messages are sent within the loop."""
    if lacking := deviceless.missing():
        pytest.skip(lacking)
    sizes = ("--layers=2", "--k=3", "--rounds-per-call=4", f"--tensor-parallel={count}")
    sizes += ("--greedy", "--gather=peers") * (count > 1)
    made = run("lab.deviceless_round", chip, tmp_path, *sizes)
    assert made["outside"]["kWhile"] == 1
    assert made["largest_copy"] < made["smallest_matrix"]
    assert count * made["aliased_bytes"] >= made["cache_bytes"]
    assert made["spills"] == 0
    assert made["collectives"].get("kAllGather", 0) == (count > 1)
    assert ("peer_gather" in made["mosaic"]) == (count > 1)
    # Beside the graph of a round, which is not counted here, at most copies before the loop.
    assert made["kernels"] < 10


@pytest.mark.parametrize(
    ("chip", "count"),
    [on("h200", 2), on("b200", 8, marks=pytest.mark.exhaustive)],
)
def test_a_round_on_several_gpus_has_two_collectives_a_layer(chip, count, tmp_path):
    """Two layers of the target and one of the head; two embeddings, the verdict and the drafts. A
    graph ends at each collective; the first and the last two follow one another."""
    if lacking := deviceless.missing():
        pytest.skip(lacking)
    sizes = ("--layers=2", "--k=3", "--concurrency=8", "--greedy", "--gather=library")
    made = run("lab.deviceless_round", chip, tmp_path, *sizes, f"--tensor-parallel={count}")
    num_gathers = 2 * (2 + 1) + 4
    assert made["collectives"] == {"kAllGather": num_gathers}
    assert made["graphs"] == num_gathers - 1
    assert made["largest_copy"] < made["smallest_matrix"]
    assert count * made["aliased_bytes"] >= made["cache_bytes"]
    assert made["spills"] == 0


@pytest.mark.parametrize(
    ("chip", "count", "requests"),
    [
        on("h200", 2, "greedy", marks=pytest.mark.exhaustive),
        on("h200", 2, "sampled"),
        on("b200", 8, "greedy"),
    ],
)
def test_a_round_on_several_gpus_is_one_graph_if_kernels_write_to_their_peers(
    chip, count, requests, tmp_path
):
    """One collective stands before it, so that the threads of the GPUs meet (`Devices.program`).
    The branches of rounds that sample, filter and adjust are part of the graph."""
    if lacking := deviceless.missing():
        pytest.skip(lacking)
    sizes = ("--layers=2", "--k=3", "--concurrency=8", "--gather=peers")
    sizes += ("--greedy",) * (requests == "greedy")
    made = run("lab.deviceless_round", chip, tmp_path, *sizes, f"--tensor-parallel={count}")
    assert made["collectives"] == {"kAllGather": 1}
    assert made["graphs"] == 1
    assert made["outside"].keys() <= {"kAllGather", "kAsyncStart", "kAsyncDone", "kCopy"}
    assert made["mosaic"]["peer_gather"] > 0
    assert made["largest_copy"] < made["smallest_matrix"]
    assert count * made["aliased_bytes"] >= made["cache_bytes"]
    assert made["spills"] == 0


@pytest.mark.parametrize("chip", [on("l4", marks=pytest.mark.exhaustive)])
def test_a_round_of_a_dense_model_is_one_graph_too(chip, tmp_path):
    """With references: no loop over keys stops at the host, no weight is copied."""
    if lacking := deviceless.missing():
        pytest.skip(lacking)
    sizes = ("--preset=qwen3-0.6b", "--layers=2", "--k=3")
    made = run("lab.deviceless_round", chip, tmp_path, *sizes)
    assert (made["graphs"], made["outside"]) == (1, {})
    assert made["largest_copy"] < made["smallest_matrix"]
    assert made["aliased_bytes"] >= made["cache_bytes"]
    assert not made["mosaic"]
    assert made["spills"] == 0
