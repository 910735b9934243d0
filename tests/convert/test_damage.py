"""Damaged checkpoints: all commands and loading refuse them in one line, or read them alike."""

import atexit
import contextlib
import io
import shutil
import tempfile
import traceback
import warnings
from functools import cache
from pathlib import Path
from random import Random

import jax
import numpy as np
import pytest

import convert.__main__ as command
from peagle_jax.checkpoint import CheckpointError, load_head, load_target, target_config
from peagle_jax.checkpoint.checked import checked_head, checked_target
from peagle_jax.checkpoint.converted import joined, open_checkpoint
from tests import memory
from tests.convert import damage
from tests.convert.seeds import SEEDS, seed, write

NUM_CHUNKS = 24
CASES_PER_CHUNK = 125
FULL_LOADS = 12
"""One in this many intact checkpoints is loaded as a model from both folders; of the others the
arrays are compared.
"""
CONVERTED = 0.15
"""Share of cases that damage a converted folder instead."""


class Broken(AssertionError):
    """A tested property that does not hold."""


def call(*argv) -> tuple[int, str]:
    """(exit code, stderr) of peagle-convert in this process.

    Raises:
      Broken: another exception than the end of the program, or an exit code that is not documented.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command.main([str(item) for item in argv])
    except SystemExit as exit_:
        code = exit_.code
    except BaseException as error:
        raise Broken(f"{argv[0]}: {''.join(traceback.format_exception(error))}") from error
    lines = err.getvalue().splitlines()
    if code not in (0, 1, 2):
        raise Broken(f"{argv[0]}: exit code {code}")
    if code == 2 and (len(lines) != 1 or not lines[0].startswith("peagle-convert: error: ")):
        raise Broken(f"{argv[0]}: {len(lines)} lines on stderr: {err.getvalue()}")
    if "Traceback" in err.getvalue() or (code == 0 and lines):
        raise Broken(f"{argv[0]}: exit code {code} and on stderr: {err.getvalue()}")
    return code, err.getvalue()


def load(folder: Path, target: Path | None):
    """The model, or None if it is refused."""
    try:
        if target is None:
            return load_target(folder, dtype="float32")
        return load_head(folder, target_config(target), dtype="float32")
    except CheckpointError as error:
        if "\n" in str(error).strip():
            raise Broken(f"loading: more than one line: {error}") from error
        return None
    except BaseException as error:
        raise Broken(f"loading: {''.join(traceback.format_exception(error))}") from error


def arrays(folder: Path, target: Path | None) -> dict[tuple, tuple]:
    """path -> (dtype, shape, bytes) of every parameter, as stored."""
    checkpoint = open_checkpoint(folder)
    if target is None:
        _, layout = checked_target(folder, checkpoint)
    else:
        _, layout = checked_head(folder, checkpoint, target_config(target))
    made = {rule.path: np.asarray(joined(checkpoint, rule)) for rule in layout.rules}
    return {path: (one.dtype, one.shape, one.tobytes()) for path, one in made.items()}


def leaves(model) -> list[tuple]:
    found = jax.tree.leaves(model)
    return [(str(one.dtype), one.shape, np.asarray(one).tobytes()) for one in found]


def check_case(base: Path, files: dict[str, bytes], *, loads_whole: bool) -> bool:
    """Whether the checkpoint is intact, after every property was checked.

    Raises:
      Broken: names the property.
    """
    folder, made, back = base / "src", base / "made", base / "back"
    write(files, folder)
    options = options_of(folder)
    target = options[1] if options else None
    planned, _ = call("plan", folder, *options)
    converted, _ = call("convert", folder, made, *options)
    if (planned == 0) != (converted == 0):
        raise Broken(f"plan ends with {planned}, convert with {converted}")
    if made.exists() != (converted == 0):
        raise Broken("a refused checkpoint was converted")
    if converted or loads_whole:
        model = load(folder, target)
        if (model is None) != (converted != 0):
            raise Broken(f"convert ends with {converted}, but loading gives {type(model).__name__}")
    if converted:
        for argv in (("verify", folder, made, *options), ("export", made, back)):
            if call(*argv)[0] == 0:
                raise Broken(f"{argv[0]} of what was refused")
        return False
    if call("verify", folder, made, *options)[0]:
        raise Broken("verify does not confirm what convert wrote")
    if call("export", made, back)[0]:
        raise Broken("export does not return what convert wrote")
    for path in [path for path in folder.iterdir() if path.is_file()]:
        if (back / path.name).read_bytes() != path.read_bytes():
            raise Broken(f"{path.name} comes back changed")
    if arrays(folder, target) != arrays(made, target):
        raise Broken("the converted folder has other values")
    if loads_whole and leaves(model) != leaves(load(made, target)):
        raise Broken("the converted folder makes another model")
    return True


@cache
def pristine(name: str) -> Path:
    """A golden checkpoint at src and what convert makes of it at made; removed when Python ends."""
    base = Path(tempfile.mkdtemp(dir=memory.root()))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    write(seed(name).files(), base / "src")
    call("convert", base / "src", base / "made", *options_of(base / "src"))
    return base


def options_of(folder: Path) -> list:
    """The options that a head needs."""
    return ["--target", folder / "target"] if (folder / "target").is_dir() else []


def check_converted(base: Path, name: str, rng: Random) -> list[str]:
    """Damages a converted folder: `verify` and `export` must refuse it or give the original values.
    Returns the damage.

    Raises:
      Broken: names the property.
    """
    source, made, back = pristine(name) / "src", base / "made", base / "back"
    shutil.copytree(pristine(name) / "made", made)
    done = [damage.break_converted(made, rng) for _ in range(rng.choice([1, 1, 2]))]
    target = source / "target" if options_of(source) else None
    try:
        verified = call("verify", source, made, *options_of(source))[0]
        if call("export", made, back)[0] == 0:
            for path in source.glob("*.safetensors"):
                if (back / path.name).read_bytes() != path.read_bytes():
                    raise Broken(f"export gives {path.name} back changed")
        elif back.exists() or back.with_name("back.partial").exists():
            raise Broken("a failed export leaves files behind")
        try:
            values = arrays(made, target)
        except CheckpointError:
            values = None
        if verified == 0 and values not in (None, arrays(source, target)):
            raise Broken("verify confirms other values")
    except Exception as error:
        lines = str(error) if isinstance(error, Broken) else traceback.format_exc()
        raise Broken(f"{'; '.join(done)}\n{lines}") from None
    return done


def run_case(number: int) -> bool | None:
    """Whether case `number` is an intact checkpoint; None if a converted folder was damaged.

    Raises:
      Broken: says how to repeat the case, what was damaged, and what does not hold.
    """
    rng = Random(number)
    name = rng.choice([*SEEDS])
    base = Path(tempfile.mkdtemp(dir=memory.root()))
    done = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            if rng.random() < CONVERTED:
                check_converted(base, name, rng)
                return None
            files, done = damage.damaged(seed(name), rng)
            return check_case(base, files, loads_whole=rng.randrange(FULL_LOADS) == 0)
    except Broken as error:
        again = f"from tests.convert.test_damage import run_case; run_case({number})"
        raise Broken(
            f"case {number} of {name}: {'; '.join(done)}\n{error}\nrepeat: python -c '{again}'"
        ) from None
    finally:
        shutil.rmtree(base)


@pytest.fixture(scope="module", autouse=True)
def one_parser():
    """The options are described once, not in each of twenty thousand calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_parser", cache(command._parser))
        yield


@pytest.mark.sampled(2, slow=0)
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_a_damaged_checkpoint_is_refused_in_one_line_or_read_alike(chunk, num_cases):
    """Each chunk tries as many cases as `--cases` says, the same first ones always."""
    number = num_cases("damaged checkpoints", CASES_PER_CHUNK)
    intact = [run_case(chunk * 10**6 + i) for i in range(number)]
    if number >= CASES_PER_CHUNK:
        assert 0.05 < intact.count(True) / number < 0.95, "damage is always harmless, or never"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SEEDS)
def test_an_undamaged_checkpoint_passes(name, tmp_path):
    files = seed(name).files()
    assert check_case(tmp_path, files, loads_whole=True)
