"""Every kernel compiles for every chip that it is made for, with registers to spare.

There need be no GPU: see `bench.deviceless`, which this runs once for a chip.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import deviceless

pytestmark = pytest.mark.slow
_ROOT = Path(__file__).parents[2]


@functools.cache
def compiled(chip: str, folder: Path) -> list[dict]:
    """The kernels of all operations, compiled in a process of their own: Mosaic takes one chip."""
    found = folder / f"{chip}.json"
    command = [sys.executable, "-m", "bench.deviceless", "--chip", chip]
    process = subprocess.run(
        [*command, "--json", found, "--dump", folder / chip],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if not found.is_file():
        log = folder / chip / "stderr.txt"
        said = log.read_text() if log.is_file() else ""
        pytest.fail(f"exit code {process.returncode}\n{process.stderr}\n{said}"[-4000:])
    return json.loads(found.read_text())


@pytest.mark.parametrize("chip", deviceless.CHIPS)
@pytest.mark.parametrize("op", deviceless.ops())
def test_kernels_compile(op, chip, tmp_path_factory):
    if lacking := deviceless.missing():
        pytest.skip(lacking)
    specs, sm = deviceless.specs_of(op), deviceless.CHIPS[chip].sm
    if sm not in specs.CHIPS:
        pytest.skip(f"{op} has no kernel for {chip}")
    kernels = [one for one in compiled(chip, tmp_path_factory.getbasetemp()) if one["op"] == op]
    assert {one["spec"] for one in kernels} == specs.SPECS.keys()
    wrong = [complaint for one in kernels if (complaint := complaint_about(one))]
    assert not wrong, "\n".join(wrong)
    if wanted := specs.MMA.get(sm):
        for spec in specs.SPECS:
            kinds = [kind for one in kernels if one["spec"] == spec for kind in one["mma"]]
            assert any(kind.startswith(wanted) for kind in kinds), f"{spec} has {kinds or 'none'}"


def complaint_about(kernel: dict) -> str | None:
    if kernel["error"]:
        what = kernel["error"]
    elif kernel["spills"]:
        what = f"{kernel['spills']} bytes spilled"
    elif kernel["registers"] > kernel["max_registers"]:
        what = f"{kernel['registers']} registers, more than {kernel['max_registers']}"
    else:
        return None
    return f"{kernel['op']} {kernel['spec']} {kernel['name']}: {what}"
