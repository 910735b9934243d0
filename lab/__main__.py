"""`python -m lab`: instruments of the development, in a clone of the repository."""

import sys

from bench.command import Program

PROGRAM = Program(
    name="python -m lab",
    package="lab",
    about="""\
Instruments of the development. Beside the commands below:

  python -m lab.deviceless  compiles kernels for absent chips; _round and _tpu compile rounds
""",
    commands={
        "batch": "commands of peagle-bench from a file, compiled beforehand side by side",
        "follow": "drafts of a head that stays and of one that learns, while their target learns",
        "hostile": "attacks on a server: what honest clients see, and its resources",
        "kernels": "each GPU kernel beside its XLA reference: time, bandwidth, error",
        "ladder": "the steps from a plain product to a grouped FP8 one, beside predictions",
        "matrix": "what runs where and how it was checked, with the test that shows it",
        "report": "redraws the tables and the plot of README.md and docs/ from bench/results",
        "rollouts": "what new weights cost a training loop, its rollouts, and their scores",
        "soak": "mixed traffic for an hour: what grows in the server's processes",
        "train-step": "a step of a head's training for a full-size target: time and memory",
    },
    extras={"batch": "serve", "hostile": "serve", "soak": "serve"},
)
main = PROGRAM.main


if __name__ == "__main__":
    sys.exit(main())
