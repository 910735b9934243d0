"""Tests compile hundreds of tiny programs and run each for milliseconds: compile cheaply, once."""

import gc
import os
import re
import signal
from collections import Counter, defaultdict
from pathlib import Path

# Threads of XLA. Mosaic's interpreter blocks one for each warpgroup that waits, in clusters of up
# to eight blocks with two.
os.environ.setdefault("NPROC", "24")
CHEAP = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"  # the workers keep the cores busy; parts cost more
    # XLA's newer code generator lowers each fusion through MLIR: it takes twice the time to
    # compile.
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
"""XLA's flags for programs that run for milliseconds."""
# For tests of several devices; the others use the first.
_FLAGS = f"{CHEAP} --xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A suite started in the background of a script ignores SIGINT, and so would every process that a
# test starts and interrupts. A handler, unlike SIG_IGN, is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing makes many objects that live long. Python's default would search them for garbage 70 times
# as often, in a tenth of the suite's time.
gc.set_threshold(50_000, 20, 20)

import pytest  # noqa: E402 (after the flags)
from hypothesis import HealthCheck, settings  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Equal programs of different tests, workers and processes that tests start compile once,
    however small. JAX_COMPILATION_CACHE_DIR keeps them for the next run."""
    import jax

    folder = str(tmp_path_factory.getbasetemp().parent / "jax-cache")
    folder = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory):
    """Commands keep programs, measured times and unpacked models apart from those of the user: what
    is left there by a run must not reach the next, and no run may push out what the user needs.
    One that runs in a test's process leaves `compilation_cache` in use for the tests after it."""
    from peagle_jax.engine.device import stored_programs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        patch.setattr(stored_programs, "use_library_cache", lambda folder: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    """The workers keep the cores busy: more threads that trace take a tenth more time."""
    from peagle_jax.engine.device import programs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "AT_ONCE", 2)
        yield


@pytest.fixture(scope="session", autouse=True)
def few_random_shapes():
    """Normal numbers outside of `jax.jit` compile for few lengths, see `tests.random_shapes`."""
    import jax

    from tests import random_shapes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "normal", random_shapes.normal)
        yield


MOST_MAPS = 16_000
"""Most memory maps of a process with which its compiled programs stay for the next file of tests:
2.7 GB. Programs that are dropped are traced and loaded again, which took a third of the time of
tests/engine with 7,000 maps. Those of a tiny engine take about 400 maps."""


MAPS_OF_A_PROCESS = 65_530


def num_maps() -> int:
    """Memory maps of this process; where the system does not say, more than it may have."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return MAPS_OF_A_PROCESS + 1


MOST_NEW_MAPS = 3000
"""Most maps more than the last search for garbage has left. What is still in use stays whatever is
searched.
"""

_left = 0  # maps after that search


@pytest.fixture(scope="module", autouse=True)
def programs_forgotten():
    """Drops compiled programs once there are many: a process may hold 65,530 memory maps, and every
    small kernel of a program takes some. Past that bound LLVM crashes. What is freed goes back to
    the system. A search for garbage takes up to a second of a large process, so only many new
    programs start one."""
    import jax

    from serving.memory import c_library_trim

    global _left
    yield
    most = max(MOST_MAPS, _left + MOST_NEW_MAPS)
    if num_maps() <= most:
        return
    gc.collect()
    if num_maps() > most:
        jax.clear_caches()
        gc.collect()
    c_library_trim()
    maps = num_maps()
    _left = maps if maps <= MAPS_OF_A_PROCESS else 0


@pytest.fixture(scope="module")
def shared_programs():
    """Engines of a file that are equal but for weights share their programs."""
    from tests import programs

    with programs.shared():
        yield


@pytest.fixture(scope="module")
def programs_without_controls():
    """As `shared_programs`, for files whose requests change no logits."""
    from tests import programs

    with programs.shared(controls=False):
        yield


def pytest_addoption(parser):
    parser.addoption(
        "--cases", type=int, help="cases that each randomised test tries, instead of its own number"
    )
    parser.addoption(
        "--only-kind",
        action="append",
        default=[],
        help="skips randomised tests whose kind of cases does not contain this text; repeatable",
    )


DEFAULT_SUITE = "not slow"
"""Markers of the tests that run where pytest is called without a file, a folder or -m."""

OTHER_SUITE = "(slow or randomised) and not exhaustive"
"""Markers of the tests that `.ci/run` runs after the default suite."""

LONGEST = (
    "test_parallel_engine.py",
    "test_notebooks.py",
    "test_parallel_sampling.py",
    "test_structured.py",
    "test_mixed_features.py",
    "test_damage.py",
    "test_recipe.py",
    "test_losslessness.py",
    "test_families.py",
    "test_generate.py",
    "test_moe_mosaic.py",
    "test_golden_families.py",
    "test_processes.py",
    "test_adaptive_rounds.py",
    "test_decode_step.py",
    "test_lossless.py",
    "test_prefix_caching.py",
    "test_not_finite.py",
    "test_sweeps.py",
    "test_golden_heads.py",
    "test_verify_attention_mosaic.py",
    "test_faults.py",
    "test_engine.py",
    "test_embedded.py",
    "test_share_loading.py",
)
"""Files that come first. A worker takes whole files: a long one at the end would leave the others
idle.
"""

# On a busy machine hypothesis may take more than its second for the first examples, and fail the
# test.
settings.register_profile("any speed", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


TOGETHER = ("tests/serving", "tests/kernels", "tests/bench", "tests/checkpoint", "tests/cli")
"""Folders whose files share programs, the longest first."""

FEW_WORKERS = 4
"""Most workers of which one takes all files of a folder in `TOGETHER`. Of more, the others would
wait for it.
"""


def scope_of(file: str, num_workers: int) -> str:
    """What one worker runs whole: the file, or its folder."""
    folder = file.rpartition("/")[0]
    return folder if folder in TOGETHER and num_workers <= FEW_WORKERS else file


def group_of(nodeid: str) -> str:
    """What one worker runs whole with `--dist loadgroup`: the tests with the same parameter
    "@name", or one test.
    """
    found = re.search(r"@\w+", nodeid)
    return found[0] if found else nodeid


def pytest_xdist_make_scheduler(config, log):
    """For `--dist loadfile`: with few workers, the files of a folder in `TOGETHER` go to one of
    them.

    For `--dist loadgroup`: `group_of`. With pytest 9.2, pytest-xdist 3.8 ignores its own mark
    `xdist_group`.
    """
    from xdist.scheduler import LoadFileScheduling, LoadGroupScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(super()._split_scope(nodeid), len(config.option.tx))

    class Groups(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    scheduling = {"loadfile": Files, "loadgroup": Groups}.get(config.getoption("dist"))
    return scheduling and scheduling(config, log)


def pytest_configure(config):
    """Without a file, folder or -m, pytest runs the default suite: all tests but the slow ones."""
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files of most tests
    if getattr(config.option, "maxworkerrestart", None) is None:
        # After a crash pytest-xdist would hand finished files to the new worker too, and wait for
        # them for ever. Without a new worker the run ends and names the test that crashed.
        config.option.maxworkerrestart = "0"
    is_default = config.args_source is not pytest.Config.ArgsSource.ARGS
    if is_default and not config.option.markexpr:
        config.option.markexpr = DEFAULT_SUITE


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Puts what takes longest first, then marks cases.

    Marks randomised tests, which take their number of cases from `num_cases`, and slow cases.

    Of a test marked `sampled(n, slow=m)`, n cases spread over its parameters stay in the default
    suite. Of the others, which are slow, m have as many new values of parameters as possible; the
    remaining ones are exhaustive. Without `slow=` all others are only slow. Exhaustive tests are
    slow too.
    """
    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    first = {name: place for place, name in enumerate(TOGETHER + LONGEST)}

    def place(item) -> int:
        file = item.nodeid.partition("::")[0]
        scope = scope_of(file, num_workers)
        return first.get(item.path.name if scope == file else scope, len(first))

    items.sort(key=place)
    cases = defaultdict(list)
    for item in items:
        if "num_cases" in getattr(item, "fixturenames", ()):
            item.add_marker("randomised")
        if item.get_closest_marker("exhaustive"):
            item.add_marker("slow")
        if sample := item.get_closest_marker("sampled"):
            number, most = sample.args[0], sample.kwargs.get("slow")
            cases[item.path, item.originalname, number, most].append(item)
    for (_, _, number, most), group in cases.items():
        step = (len(group) - 1) / max(1, number - 1)
        kept = [group[place] for place in sorted({round(step * i) for i in range(number)})]
        others = [item for item in group if item not in kept]
        chosen = others if most is None else covering(others, kept, most)
        for item in others:
            item.add_marker("slow")
            if item not in chosen:
                item.add_marker("exhaustive")


def covering(items: list, others: list, number: int) -> list:
    """At most `number` of `items`: each time one with most values of parameters that no chosen item
    or other has, and of these one whose values are rarest among them."""

    def values(item) -> set:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return {(name, repr(value)) for name, value in params.items()}

    seen = Counter(value for item in others for value in values(item))
    left, chosen = list(items), []
    while left and len(chosen) < number:
        counts = [[seen[value] for value in values(item)] for item in left]
        place = max(range(len(left)), key=lambda i: (counts[i].count(0), -sum(counts[i])))
        chosen.append(left.pop(place))
        seen.update(values(chosen[-1]))
    return chosen


def pytest_collection_finish():
    """What imports and collection made lives on: no search for garbage visits it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    gc.unfreeze()  # hypothesis, which may be imported late, finds no references from frozen objects


@pytest.fixture
def num_cases(request, record_property):
    """`num_cases("damaged checkpoints", 3000)` returns how many cases to try: --cases, or the
    default.

    The default suite tries a tenth of the default, but 10 or more; fewer defaults stay as they are.
    A statistical test names the least number with which its bounds hold: `least=3000`.

    Kind and number go into JUnit's XML.
    """

    def choose(kind: str, default: int, least: int = 1) -> int:
        only = request.config.getoption("--only-kind")
        if only and not any(text in kind for text in only):
            pytest.skip(f"tries {kind}")
        suite, few = request.config.option.markexpr, min(default, max(10, default // 10))
        is_slow = request.node.get_closest_marker("slow") is not None
        if suite == OTHER_SUITE and not is_slow and max(least, few) == max(least, default):
            pytest.skip("the default suite tries as many cases")
        if suite == DEFAULT_SUITE:
            default = few
        number = max(least, request.config.getoption("--cases") or default)
        record_property("tried", f"{number} {kind}")
        return number

    return choose
