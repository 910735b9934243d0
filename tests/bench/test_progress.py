"""Progress of benches, as a log shows it."""

from bench.progress import progress_bar, warm_up
from peagle_jax import EngineConfig


class _Engine:
    """Three programs; nothing runs."""

    num_programs = 3
    config = EngineConfig()

    def warm_up(self, on_compiled, *, only_greedy: bool):
        assert not only_greedy
        for _ in range(self.num_programs):
            on_compiled()


def test_a_log_has_the_beginning_of_a_bar(capsys):
    with progress_bar(total=4, desc="rows") as bar:
        bar.update()
    assert "rows:   0%" in capsys.readouterr().err


def test_compilation_is_shown_by_program(capsys):
    warm_up(_Engine(), "peagle K=7")
    shown = capsys.readouterr().err
    assert "peagle K=7: compiling:   0%" in shown
    assert "0/3" in shown
