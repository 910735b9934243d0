"""`peagle-train`: mistakes are refused in one line, and Ctrl-C leaves one line."""

import os

import numpy as np
import pytest

from peagle_jax.checkpoint.folder_lock import lock_folder
from peagle_jax.config import ConfigError
from peagle_jax.training import __main__ as command
from peagle_jax.training import drafter
from peagle_jax.training.options import REMOVED
from peagle_jax.training.stored_text import batches, held_out, load_text
from tests import tiny
from tests.training.small import head_options, run_config

HEAD = "head --target {made} --prompts {made} --out {root}/new"


@pytest.fixture
def folders(tmp_path):
    """`made` is a folder, `file` and `gguf` are files."""
    made, file, gguf = (tmp_path / name for name in ("made", "file", "m.gguf"))
    made.mkdir()
    file.touch()
    gguf.touch()
    return dict(root=tmp_path, made=made, file=file, gguf=gguf)


def refusal(line: str, capsys) -> str:
    with pytest.raises(SystemExit) as exit:
        command.main(line.split())
    assert exit.value.code == 2
    return capsys.readouterr().err


def test_two_runs_cannot_write_one_folder(folders, capsys):
    lock = lock_folder(folders["root"] / "new")
    assert "new: another run is writing it" in refusal(HEAD.format(**folders), capsys)
    os.close(lock)
    assert "another run" not in refusal(HEAD.format(**folders), capsys)
    assert not (folders["root"] / "new").exists()  # a refused run leaves no folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{HEAD} --temperatures -1", "--temperatures -1.0 must be at least 0"),
        (f"{HEAD} --temperatures 0 nan", "--temperatures nan must be at least 0"),
        (f"{HEAD} --epochs 0", "--epochs 0.0 must be a number above 0"),
        (f"{HEAD} --length 0", "--length 0 must be at least 1"),
        ("synthesize --target {made} --out {file}", "--out {file}: is a file; give a folder"),
        ("synthesize --target {made} --out {file}/new", "--out {file}: is a file; give a folder"),
        ("synthesize --target {root}/no --out {root}/new", "--target {root}/no: no such folder\n"),
        (
            "plan --target {gguf}",
            "--target {gguf}: is no folder; `peagle-convert gguf {gguf} FOLDER`",
        ),
        (
            "plan --target owner/name",
            "--target owner/name: no such folder, and hub ids are not read",
        ),
        (
            "head --target {made} --prompts {root}/no --out {root}/new",
            "--prompts {root}/no: no such file",
        ),
        ("plan --preset gpt-9", "--preset gpt-9: known are"),
        (f"{HEAD} --method dflash --draft-vocab 9", "--draft-vocab has no effect: --method dflash"),
        ("plan --preset gpt-9 --method dflash --share embedding", "--share has no effect: --meth"),
        (f"{HEAD} --method eagle3 --share embedding", "--share embedding has no effect: --method"),
        (f"{HEAD} --log-to wandb", "--log-to wandb needs wandb: pip install wandb"),
        (f"{HEAD} --init {{root}}/none", "--init {root}/none: no such folder"),
        (f"{HEAD} --init {{root}} --layers 2", "--layers has no effect: --init has the head's"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(folders, capsys, line, message):
    error = refusal(line.format(**folders), capsys)
    assert error.startswith(f"peagle-train: error: {message.format(**folders)}")
    assert error.count("\n") == 1
    assert not (folders["root"] / "new").exists()


def test_a_removed_option_is_refused_with_the_reason(capsys):
    error = refusal("head --selector-kind lattice", capsys)
    assert error.startswith(
        "peagle-train head: error: --selector-kind is removed: at equal minutes"
    )


@pytest.mark.parametrize("stage", REMOVED)
def test_a_removed_stage_is_refused_with_the_reason(stage, capsys):
    error = refusal(f"{stage} --out run", capsys)
    assert error == f"peagle-train: error: {stage} {REMOVED[stage]}\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --preset qwen3-0.6b", "interrupted"),
        (HEAD, "interrupted; the same command goes on from the last finished part"),
    ],
)
def test_ctrl_c_leaves_one_line(folders, capsys, monkeypatch, line, message):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(command._STAGES, line.split()[0], interrupted)
    assert command.main(line.format(**folders).split()) == 130
    assert capsys.readouterr().err.strip() == f"peagle-train: {message}"


def test_texts_of_another_vocabulary_are_refused(tmp_path):
    ends = dict(prompt=np.full(2, 3), length=np.full(2, 12))
    tokens = np.full((2, 12), 127, np.uint16)
    np.savez(tmp_path / "heldout.npz", tokens=tokens, **ends)
    tokens[1, 5] = 511
    np.savez(tmp_path / "train.npz", tokens=tokens, **ends)
    message = r"train.npz: has token 511; the target's vocabulary has 128$"
    with pytest.raises(ConfigError, match=message):
        drafter.make_task(
            tiny.HEAD, tiny.target(), head_options(texts=tmp_path), run_config(tmp_path, 1)
        )


GOOD = dict(tokens=np.full((4, 12), 5), prompt=np.full(4, 3), length=np.full(4, 12))
BROKEN = {
    "negative ids": (dict(tokens=np.full((4, 12), -1)), "has token -1"),
    "fractions": (dict(tokens=np.full((4, 12), 1.5)), "needs whole numbers"),
    "one axis": (dict(tokens=np.full(12, 5)), "needs whole numbers"),
    "other number": (dict(prompt=np.full(3, 3)), "needs whole numbers"),
    "objects": (dict(tokens=np.array([[1], [2, 3]], object)), "allow_pickle"),
    "prompt above length": (dict(prompt=np.full(4, 13)), "1 <= prompt <= length <= 12"),
    "no prompt": (dict(prompt=np.zeros(4, int)), "1 <= prompt <= length <= 12"),
    "length above the row": (dict(length=np.full(4, 13)), "1 <= prompt <= length <= 12"),
    "nothing written": (dict(prompt=np.full(4, 11)), "nothing to train"),
    "no answer": (dict(answer=np.zeros((4, 12), bool)), "nothing to train"),
    "numbers as answer": (dict(answer=np.ones((4, 12))), "needs whole numbers"),
    "no rows": ({key: x[:0] for key, x in GOOD.items()}, "has no texts"),
    "longer than the target": (dict(tokens=np.full((4, 513), 5)), "max_position is 512"),
    "a missing array": (dict(length=None), "has no array 'length'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_of_texts_is_refused_when_it_is_opened(tmp_path, name):
    changed, message = BROKEN[name]
    arrays = {key: x for key, x in (GOOD | changed).items() if x is not None}
    np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(ConfigError) as raised:
        load_text(tiny.TARGET, tmp_path, "train")
    assert str(raised.value).startswith(f"{tmp_path}/train.npz: ")
    assert message in str(raised.value)


def test_junk_is_no_file_of_texts(tmp_path):
    for junk in (b"", b"PK", b"junk" * 9):
        (tmp_path / "train.npz").write_bytes(junk)
        with pytest.raises(ConfigError, match=r"train.npz: "):
            load_text(tiny.TARGET, tmp_path, "train")


def test_too_few_texts_for_a_step_or_an_evaluation_are_refused():
    text = drafter.Text(*(np.full(shape, 3) for shape in ((3, 9), 3, 3)))
    with pytest.raises(ConfigError, match="a step has 4 texts, and there are 3"):
        batches(text, 4, 0)
    with pytest.raises(ConfigError, match="a piece has 4 held-out texts, and there are 3"):
        held_out(text, 16, 512)
    assert [len(piece.tokens) for piece in held_out(text, 4, 2)] == [1, 1]


def test_an_epoch_has_every_text_once_and_the_next_another_order():
    tokens = np.broadcast_to(np.arange(6)[:, None], (6, 8))  # text i consists of token i
    batch = batches(drafter.Text(tokens, np.full(6, 2), np.full(6, 8)), 2, seed=0)
    epochs = [[tuple(batch(step).tokens[:, 0]) for step in range(i, i + 3)] for i in (0, 3)]
    for epoch in epochs:
        assert sorted(sum(epoch, ())) == list(range(6))
    assert epochs[0] != epochs[1]
