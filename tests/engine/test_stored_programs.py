"""Programs on disk: which changes make a new file, and files that must not be used."""

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from peagle_jax import EngineConfig, SamplingParams
from peagle_jax.engine.device import stored_programs
from peagle_jax.engine.device.stored_programs import StoredPrograms, make_room
from peagle_jax.method.verify import verify, verify_blocks
from tests import suite
from tests.programs import small_engine
from tests.waiting import LIMIT

CONFIG = EngineConfig(
    num_draft=2, max_num_seqs=1, max_model_len=64, page_size=4, greedy_rounds=False
)
PROMPT = [3, 4, 5, 6, 7]
PARAMS = (
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=3),
)


@pytest.fixture
def folder(tmp_path):
    """Programs are kept here."""
    return tmp_path / "programs"


def stored(folder: Path, structure=None, config=CONFIG, statics=None) -> StoredPrograms:
    tree = jax.tree.structure([1, 2]) if structure is None else structure
    config = replace(config, programs_folder=folder)
    return StoredPrograms(tree, config, jax.devices()[:1], statics or {"accept": verify})


def shapes(*arrays) -> tuple:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)


class Doubler:
    """A program of its own: [n] float32 to twice as much. It consumes its operand."""

    def __init__(self):
        self.num_lowered = 0
        self.function = jax.jit(lambda x: 2 * x, donate_argnums=0)

    def __call__(self, kept: StoredPrograms):
        def lower(*operands):
            self.num_lowered += 1
            return self.function.lower(*operands)

        operands = shapes(jnp.ones(8))
        return kept.program("double", operands, operands[0], lower, {})


def check(program) -> None:
    given = jnp.arange(8.0)
    assert np.array_equal(program(given), 2 * np.arange(8.0))
    assert given.is_deleted()  # consumed, as by the program that was compiled


def path_of(kept: StoredPrograms, name="a", operands=(), options=None):
    return kept.path_of(name, operands, options or {})


def tokens_of(config=CONFIG) -> list[list[int]]:
    engine = small_engine(config)
    engine.warm_up()
    return [engine.generate([PROMPT], params)[0].tokens for params in PARAMS]


_OTHER_PROCESS = """
import json, sys
from pathlib import Path
from peagle_jax.method import step
from tests.engine import test_stored_programs as tests

def refuse(*args, **given):
    raise AssertionError("traced")

if sys.argv[2] == "warm":
    step.prefill = step.speculative_step = refuse
changes = dict(programs_folder=Path(sys.argv[1]), tensor_parallel=int(sys.argv[3]))
print(json.dumps(tests.tokens_of(tests.replace(tests.CONFIG, **changes))))
"""


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("devices", ["2", "1"])
def test_another_process_traces_nothing_and_writes_the_same(tmp_path, devices):
    def tokens(start: str) -> list:
        command = [sys.executable, "-c", _OTHER_PROCESS, str(tmp_path / "programs"), start, devices]
        flags = f"{suite.CHEAP} --xla_force_host_platform_device_count=2"
        made = subprocess.run(
            command,
            env=os.environ | {"XLA_FLAGS": flags},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert made.returncode == 0, made.stderr[-2000:]
        return json.loads(made.stdout.splitlines()[-1])

    assert tokens("cold") == tokens("warm")


def test_a_program_is_loaded_from_its_file(folder):
    double = Doubler()
    for _ in range(3):
        check(double(stored(folder)))
    assert double.num_lowered == 1
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def _other_content(path):
    path.write_bytes(stored_programs._FORMAT + b"\x80" * 4000)


def _of_another_program(path):
    kept, operands = stored(path.parent), shapes(jnp.ones(8))
    lower = jax.jit(lambda x: 3 * x, donate_argnums=0).lower
    kept.program("triple", operands, operands[0], lower, {})
    shutil.copyfile(kept.path_of("triple", operands, {}), path)


def _by_link(path):
    other = path.with_suffix(".moved")
    path.rename(other)
    path.symlink_to(other)


def _flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:30]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.chmod(0o666),
        _flipped,
        _other_content,
        _of_another_program,
        _by_link,
    ],
    ids=["empty", "shorter", "header", "longer", "writable", "flipped", "other", "renamed", "link"],
)
def test_a_file_that_must_not_be_used_is_compiled_anew(folder, spoil, caplog):
    double = Doubler()
    double(stored(folder))
    (path,) = folder.iterdir()
    spoil(path)
    with caplog.at_level(logging.WARNING):
        check(double(stored(folder)))
    assert double.num_lowered == 2
    assert [record for record in caplog.records if str(path) in record.getMessage()]
    caplog.clear()
    check(double(stored(folder)))  # the file was written anew
    assert (double.num_lowered, caplog.records) == (2, [])


def test_an_executable_of_another_version_is_compiled_anew(folder, caplog):
    """Under the right name and with the right digest, as one whose metadata are stale."""
    double = Doubler()
    double(stored(folder))
    (path,) = folder.iterdir()
    content = zlib.decompress(stored_programs._read(path))
    for other in (content[: len(content) // 2], b"", pickle.dumps("of another version")):
        stored_programs._write(path, zlib.compress(other))
        caplog.clear()
        check(double(stored(folder)))
        assert "is compiled anew" in caplog.text


@pytest.mark.parametrize("change", ["device_kind", "platform_version"])
def test_another_device_or_runtime_has_other_files(folder, change):
    names = dict(id=0, platform="cpu", device_kind="cpu", platform_version="jaxlib 1")

    def path(names: dict) -> Path:
        client = SimpleNamespace(platform_version=names["platform_version"])
        device = SimpleNamespace(**names, client=client)
        config = replace(CONFIG, programs_folder=folder)
        kept = StoredPrograms(jax.tree.structure(1), config, [device], {"accept": verify})
        return path_of(kept)

    assert path(names) == path(dict(names)) != path(names | {change: "another"})


LIBRARY = """
import json, sys
from pathlib import Path
import jax, numpy as np
from peagle_jax.engine.device import stored_programs
stored_programs.use_library_cache(Path(sys.argv[1]))
hits = []

def listen(name, **_):
    if name.endswith("cache_hits"):
        hits.append(name)

jax.monitoring.register_event_listener(listen)
f, g = jax.jit(lambda x: x * 2), jax.jit(lambda x, y: (x + y, x - y))
x = np.array([1.0, 2.0, 3.0], np.float32)
found = [f(x).tolist(), [one.tolist() for one in g(x, x)]]
print(json.dumps([len(hits), *found]))
"""


@pytest.mark.slow
def test_what_jax_keeps_itself_has_the_same_rules(tmp_path):
    """Entries that were exchanged, or that others can write, compile anew."""

    def run(folder) -> tuple[int, str]:
        made = subprocess.run(
            [sys.executable, "-c", LIBRARY, str(folder)],
            capture_output=True,
            text=True,
            check=True,
            timeout=LIMIT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": ""},
        )
        hits, *found = json.loads(made.stdout)
        assert found == [[2.0, 4.0, 6.0], [[2.0, 4.0, 6.0], [0.0, 0.0, 0.0]]]
        return hits, made.stderr

    folder = tmp_path / "cache"
    assert run(folder)[0] == 0
    entries = sorted(folder.glob("*.jax"))
    hits, _ = run(folder)
    assert hits == len(entries) >= 2
    first, second = entries[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    hits, log = run(folder)
    assert hits == len(entries) - 2
    assert log.count("is ignored: it is damaged") == 2
    first.chmod(0o666)
    hits, log = run(folder)
    assert (hits, log.count("another user owns it or can write to it")) == (len(entries) - 1, 1)
    folder.chmod(0o777)
    assert run(folder)[0] == 0


def test_what_the_runtime_cannot_serialise_is_used_and_not_kept(folder, monkeypatch, caplog):
    def fail(*args):
        raise NotImplementedError("host callbacks")

    monkeypatch.setattr(stored_programs.serialize_executable, "serialize", fail)
    check(Doubler()(stored(folder)))
    assert list(folder.iterdir()) == []
    assert "cannot be kept on disk: NotImplementedError: host callbacks" in caplog.text


def test_a_folder_that_others_can_write_is_not_used(folder, caplog):
    folder.mkdir()
    folder.chmod(0o777)
    double = Doubler()
    for _ in range(2):
        check(double(stored(folder)))
    assert double.num_lowered == 2
    assert list(folder.iterdir()) == []
    assert "no other can write to" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        dict(config=replace(CONFIG, num_draft=3)),
        dict(config=replace(CONFIG, max_logprobs=3)),
        dict(config=replace(CONFIG, greedy_rounds=None, rounds_per_call=2)),
        dict(config=replace(CONFIG, draft_sampling="sample")),
        dict(structure=jax.tree.structure([1, (2,)])),
        dict(statics={"accept": verify_blocks}),
        dict(statics={"accept": verify, "taps": (1, 2)}),
    ],
)
def test_another_engine_has_other_files(folder, change):
    assert path_of(stored(folder, **change)) != path_of(stored(folder))


def test_what_only_the_host_reads_changes_no_file(folder):
    of_host = replace(CONFIG, max_waiting=7)
    assert path_of(stored(folder, config=of_host)) == path_of(stored(folder))


def test_another_call_has_another_file(folder):
    kept = stored(folder)
    calls = [
        dict(),
        dict(name="b"),
        dict(operands=shapes(jnp.ones(3))),
        dict(operands=shapes(jnp.ones(4))),
        dict(operands=shapes(jnp.ones(3, jnp.int32))),
        dict(operands=(shapes(jnp.ones(3)),)),
        dict(options={"xla_embed_ir_in_executable": True}),
    ]
    assert len({path_of(kept, **call) for call in calls}) == len(calls)


@pytest.mark.parametrize("name", ["sources", "_versions", "_processor", "_variables", "_settings"])
def test_another_surrounding_has_other_files(folder, name, monkeypatch):
    before = path_of(stored(folder))
    assert path_of(stored(folder)) == before
    with dispatch.traced(num_devices=2):
        assert path_of(stored(folder)) != before
    value = getattr(stored_programs, name)()
    monkeypatch.setattr(stored_programs, name, lambda: [value, "other"])
    assert path_of(stored(folder)) != before


def test_variables_and_settings_of_the_compiler_count(folder, monkeypatch):
    before = path_of(stored(folder))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("MOSAIC_GPU_RUNTIME_LIB_PATH", "/set/by/jax")  # once it has traced a kernel
    assert path_of(stored(folder)) == before
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math")
    other = path_of(stored(folder))
    assert other != before
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert path_of(stored(folder)) not in (before, other)
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert path_of(stored(folder)) == other


def test_a_rule_without_a_name_is_not_kept(folder, caplog):
    with caplog.at_level(logging.INFO):
        for rule in (lambda *args: verify(*args), partial(verify, in_blocks=lambda: None)):
            assert path_of(stored(folder, statics={"accept": rule})) is None
            assert "not kept on disk" in caplog.text
            caplog.clear()

    def keyed(*args):
        return verify(*args)

    found = set()
    for keyed.program_key in ("one", "two"):
        found.add(path_of(stored(folder, statics={"accept": keyed})))
    assert len(found) == 2
    assert None not in found


def test_a_drafter_of_another_package_is_not_kept(folder):
    @jax.tree_util.register_static
    class Drafter:
        pass

    assert path_of(stored(folder, jax.tree.structure(Drafter()))) is None


def test_files_used_the_longest_ago_make_room(tmp_path):
    for age, name in enumerate(("new", "used", "old", "older")):
        path = tmp_path / f"{name}.program"
        path.write_bytes(b"x" * 10)
        os.utime(path, (1e9 - age, 1e9 - age))
    abandoned, kept = tmp_path / "a.part", tmp_path / "b.part"
    for path in (abandoned, kept):
        path.write_bytes(b"")
    os.utime(abandoned, (1e9, 1e9))
    make_room(tmp_path, 25)
    assert {path.name for path in tmp_path.iterdir()} == {"new.program", "used.program", "b.part"}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_engines_that_write_the_same_program_at_once_leave_one_file(folder, is_enabled):
    jax.config.update("jax_enable_compilation_cache", is_enabled)
    together = threading.Barrier(4, timeout=60)
    programs = []

    def one():
        kept = stored(folder)
        together.wait()
        programs.append(Doubler()(kept))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for program in programs:
        check(program)
    assert len(programs) == 4
    assert [path.suffix for path in folder.iterdir()] == [".program"]
    assert jax.config.jax_enable_compilation_cache is is_enabled  # as before
    jax.config.update("jax_enable_compilation_cache", True)


def test_the_library_of_kernels_is_known_before_a_program_for_a_gpu_loads(folder, monkeypatch):
    """Tracing a kernel would import it, but a start that loads its programs traces none."""
    name = "jax.experimental.pallas.mosaic_gpu"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(dispatch, "platform", lambda: "cuda")
    stored(folder)
    assert name in sys.modules
