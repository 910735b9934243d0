"""What an installation without extras has: the engine, and one sentence for the rest."""

import subprocess
import sys

import pytest

import peagle_jax
from peagle_jax.config import ConfigError
from peagle_jax.extras import PACKAGES, check_installed, is_installed

SERVERS_ONLY = {name.partition(".")[0] for name in PACKAGES["serve"]}
WITHOUT = "import sys; sys.modules |= dict.fromkeys(sys.argv[1].split()); del sys.argv[1]\n"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs code in a new interpreter in which the packages of the extras are not installed."""
    command = [sys.executable, "-c", WITHOUT + code, " ".join(SERVERS_ONLY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", peagle_jax.__all__)
def test_each_public_name_exists(name):
    assert getattr(peagle_jax, name).__name__ == name


def test_the_engine_needs_no_extra_and_imports_nothing_that_few_need():
    code = "from peagle_jax import Engine, load; print(*sys.modules.keys() & set(sys.argv[1:]))"
    done = run(code, "transformers", "tensorstore", "orbax")
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.slow
def test_a_text_needs_no_extra():
    done = run("from peagle_jax.__main__ import main; sys.exit(main())", "x", "--max-tokens", "2")
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("module", "extra", "arguments"),
    [
        ("serving.__main__", "serve", ["--help"]),
        ("serving.client", "serve", ["x"]),
        ("bench.__main__", "serve", ["serve-load", "--help"]),
        ("peagle_jax.__main__", "serve", ["--batch", "in.jsonl", "out.jsonl"]),
        ("peagle_jax.__main__", "structured", ["x", "--json-object", "--max-tokens", "2"]),
    ],
)
def test_a_command_says_which_extra_it_needs(module, extra, arguments):
    done = run(f"from {module} import main; sys.exit(main())", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert f"python -m pip install 'peagle-jax[{extra}]'" in line


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("serving", []),
        ("peagle_jax", ["x"]),
        ("peagle_jax.training", ["plan", "--target", "."]),
        ("bench", ["acceptance"]),
        ("convert", ["plan", "."]),
    ],
)
def test_too_little_address_space_is_one_line(module, arguments):
    command = 'ulimit -v 600000; exec "$@"'
    command = ["sh", "-c", command, "sh", sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, "585 MiB of address space" in line) == (2, True), line


def test_a_package_within_a_missing_package_is_missing(monkeypatch):
    assert not is_installed("no_such_package.within")
    check_installed("structured", "a test")
    monkeypatch.setitem(PACKAGES, "nothing", ("no_such_package.within",))
    with pytest.raises(ConfigError, match="a test needs the package"):
        check_installed("nothing", "a test")
