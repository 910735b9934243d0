"""`peagle-train`: mistakes in options and data are refused in one line, and Ctrl-C leaves one line."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from peagle_jax.checkpoint.safetensors import CheckpointError
from peagle_jax.config import ConfigError
from peagle_jax.training import __main__ as command
from peagle_jax.training import continuations, data, drafter, selector, target
from peagle_jax.training.options import parser
from peagle_jax.training.stored_text import load_text
from tests import tiny
from tests.training.test_heads import _options
from tests.training.test_trainer import RUN

TEXTS = "continuations --data {made} --target {made} --out {root}/new"


@pytest.fixture
def folders(tmp_path):
    """`made` has the files of earlier stages, all empty; `bare` has none; `file` is a file."""
    made, bare, file = (tmp_path / name for name in ("made", "bare", "file"))
    made.mkdir()
    bare.mkdir()
    for path in (file, made / "tokenizer.json", made / "train.npz"):
        path.touch()
    return dict(root=tmp_path, made=made, bare=bare, file=file)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{TEXTS} --temperatures -1", "--temperatures -1.0 must be at least 0"),
        (f"{TEXTS} --temperatures 0 nan", "--temperatures nan must be at least 0"),
        (f"{TEXTS} --header-share 3", "--header-share 3.0 must be between 0 and 1"),
        (f"{TEXTS} --min-prompt 30 --max-prompt 10", "--min-prompt 30 is above --max-prompt 10"),
        ("data {bare} --out {root}/new", "{bare}: no Python file to train on"),
        ("target --data {bare} --out {root}/new --steps 1",
         "--data {bare}: no tokenizer.json; give a folder that `data` wrote"),
        ("target --data {made} --out {file} --steps 1", "--out {file}: is a file; give a folder"),
        ("target --data {made} --out {file}/new --steps 1", "--out {file}: is a file; give a folder"),
        ("drafter --method peagle --target {made} --text {bare} --out {root}/new --steps 1",
         "--text {bare}: no train.npz; give a folder that `continuations` wrote"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_nothing_is_written(folders, capsys, line, message):
    with pytest.raises(SystemExit) as exit:
        command.main(line.format(**folders).split())
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"peagle-train: error: {message.format(**folders)}\n"
    assert not (folders["root"] / "new").exists()


@pytest.mark.parametrize("options", ["--header-share 0", "--header-share 1", "--temperatures 0 1"])
def test_the_ends_of_a_range_are_in_it(folders, options):
    line = f"{TEXTS} {options}".format(**folders)
    command.check(command.parser().parse_args(line.split()))


def test_files_that_are_all_rejected_are_counted(tmp_path):
    (tmp_path / "short.py").write_text("pass\n")
    options = data.DataOptions(
        folders=(tmp_path,), vocab_size=300, sample_bytes=9, max_bytes=9, num_headers=1, seed=0
    )
    with pytest.raises(ConfigError, match=r"no Python file to train on; 1 rejected: size$"):
        data.prepare(options, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stage", "line", "message"),
    [
        ("data", "data {bare} --out {root}/new", "interrupted"),
        ("target", "target --data {made} --out {root}/new --steps 1",
         "interrupted; the same command goes on from the last checkpoint"),
        ("continuations", TEXTS, "interrupted; the same command goes on from the last finished batch"),
    ],
)  # fmt: skip
def test_ctrl_c_leaves_one_line(folders, capsys, monkeypatch, stage, line, message):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(command._STAGES, stage, interrupted)
    assert command.main(line.format(**folders).split()) == 130
    assert capsys.readouterr().err.strip() == f"peagle-train: {message}"


def test_texts_longer_than_the_target_are_refused():
    options = continuations.ContinuationOptions(
        data=None, num=1, num_heldout=1, length=513, batch=1, min_prompt=1, max_prompt=2,
        header_share=0.0, temperatures=(0.0,), seed=0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--length 513 is above the target's max_position 512"):
        continuations.check_length(options, tiny.TARGET)
    continuations.check_length(replace(options, length=512), tiny.TARGET)


def _target_options(folder: Path) -> target.TargetOptions:
    return target.TargetOptions(
        data=folder, sequence=8, batch=1, dtype="float32", attention="xla", loss_chunk=16,
        eval_sequences=1, text=folder, text_batch=1,
    )  # fmt: skip


def _selector_task(folder: Path):
    options = selector.SelectorOptions(
        continuations=folder, rank=2, batch=1, num_depths=2, dtype="float32", attention="xla",
        loss_chunk=16, eval_sequences=1, num_draft=1,
    )  # fmt: skip
    return selector.make_task(tiny.head(), tiny.target(), options, RUN)


MAKE = {
    "drafter": lambda folder: drafter.make_task(
        tiny.HEAD, tiny.target(), _options(continuations=folder), RUN
    ),
    "selector": _selector_task,
    "target": lambda folder: target.make_task(tiny.TARGET, _target_options(folder), RUN),
}


@pytest.mark.parametrize("stage", MAKE)
def test_texts_of_another_vocabulary_are_refused(tmp_path, stage):
    tokens = np.full((2, 12), 127, np.uint16)
    save = partial(np.savez, prompt=np.full(2, 3), length=np.full(2, 12), temperature=np.zeros(2))
    save(tmp_path / "heldout.npz", tokens=tokens)
    tokens[1, 5] = 511
    save(tmp_path / "train.npz", tokens=tokens)
    for name in ("train", "heldout"):
        np.save(tmp_path / f"{name}.npy", np.zeros(40, np.uint16))
    message = r"^--text .*train.npz: has token 511; the target's vocabulary has 128$"
    with pytest.raises(ConfigError, match=message):
        MAKE[stage](tmp_path)


def test_longer_texts_of_another_vocabulary_are_refused(tmp_path):
    tokens = np.full((2, 12), 200)
    text = drafter.Text(tokens, np.full(2, 3), np.full(2, 12))
    np.savez(tmp_path / "train.npz", **text.arrays())
    with pytest.raises(
        ConfigError, match=r"^--long-text .*train.npz: has token 200; the target's vocabulary"
    ):
        drafter.training_batches(text, _options(long_text=tmp_path), RUN, tiny.TARGET)


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
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_of_texts_is_refused_when_it_is_opened(tmp_path, name):
    changed, message = BROKEN[name]
    arrays = {key: x for key, x in (GOOD | changed).items() if x is not None}
    np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(ConfigError) as raised:
        load_text(tiny.TARGET, tmp_path, "train")
    assert str(raised.value).startswith(f"--text {tmp_path}/train.npz: ")
    assert message in str(raised.value)


def test_junk_is_no_file_of_texts(tmp_path):
    for junk in (b"", b"PK", b"junk" * 9):
        (tmp_path / "train.npz").write_bytes(junk)
        with pytest.raises(ConfigError, match=r"^--text .*train.npz: "):
            load_text(tiny.TARGET, tmp_path, "train")


def test_messages_name_what_to_change(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"^--method peagle: the head does not fit the target"
    ):
        drafter.init_head(replace(tiny.HEAD, taps=(9, 1, 2)), tiny.target(), 0)
    for name in ("train", "heldout"):
        np.save(tmp_path / f"{name}.npy", np.zeros(17, np.uint16))
    message = (
        "train.npy has 17 tokens; --sequence needs 18; lower --sequence or give `data` more text"
    )
    with pytest.raises(ConfigError, match=message):
        target.make_task(tiny.TARGET, _target_options(tmp_path), RUN)


@pytest.mark.parametrize(
    ("stage", "shown"), [("data", "(default 8192)"), ("selector", "(default adamw)"), ("target", "(default muon)")]
)  # fmt: skip
def test_help_shows_the_defaults_of_a_stage(stage, shown, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args([stage, "--help"])
    text = capsys.readouterr().out
    assert shown in text
    assert "(default None)" not in text
    assert "(default False)" not in text
