"""`peagle-bench sizes`."""

from bench.command import Command, Options


def run(options: Options) -> int:
    from bench.sizes import table

    print(table())
    return 0


COMMAND = Command(
    name="sizes",
    summary="weights, KV cache and number of sequences that fit on one GPU, by model and format",
    examples=("sizes",),
    description="""
Prints a table: parameters, bytes of weights and of the KV cache, and how many sequences fit on one H200.
Nothing is measured.
""",
    options=Options,
    run=run,
)
