"""A tiny random model in folders, as a user would have it: target, tokenizer, two heads."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from peagle_jax.__main__ import main
from peagle_jax.checkpoint import save_head, save_target
from tests import programs, tiny

VOCAB = 280
MAX_POSITION = 256


@dataclass(frozen=True)
class Folders:
    """Where the tiny model lies."""

    target: Path
    peagle: Path
    eagle3: Path

    def options(self, method: str = "peagle") -> list[str]:
        drafter = [] if method == "none" else ["--drafter", str(getattr(self, method))]
        return ["--model", str(self.target), *drafter, "--method", method, "--no-cache"]


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with programs.shared(controls=False):
        yield


def save_tokenizer(folder: Path) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<eos>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["def quicksort(xs): return xs  # def quick, return xs"], trainer)
    backend.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Folders:
    root = tmp_path_factory.mktemp("model")
    sizes = dict(vocab_size=VOCAB)
    target = tiny.target(**sizes, num_layers=2, max_position=MAX_POSITION)
    save_target(target, root / "target", dtype="float32")
    save_tokenizer(root / "target")
    sizes |= dict(draft_vocab_size=VOCAB, num_layers=1)
    for method in ("peagle", "eagle3"):
        mask = None if method == "eagle3" else 1
        head = tiny.head(method, **sizes, mask_token_id=mask, trained_num_draft=4)
        save_head(head, root / method, max_position=MAX_POSITION, dtype="float32")
    return Folders(root / "target", root / "peagle", root / "eagle3")


@pytest.fixture
def broken(folders, tmp_path) -> Folders:
    """A copy to break."""
    copies = {name: tmp_path / name for name in ("target", "peagle", "eagle3")}
    for name, path in copies.items():
        shutil.copytree(getattr(folders, name), path)
    return replace(folders, **copies)


@pytest.fixture
def generate(capsys):
    """Runs the command in this process: `(exit code, stdout, stderr)`."""

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main([str(item) for item in argv])
        except SystemExit as exit_:  # argparse
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out, err

    return call
