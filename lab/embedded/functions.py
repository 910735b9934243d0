"""Functions with docstrings, cut out of source files."""

import ast
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

MIN_LINES, MAX_LINES = 3, 40
_FILES_PER_JOB = 64


def functions(source: str) -> list[str]:
    """Undecorated functions and methods with a docstring, dedented, of 3 to 40 lines.

    A file that this Python cannot parse has none.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = source.splitlines()
    return [
        textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.decorator_list
        and MIN_LINES <= node.end_lineno - node.lineno + 1 <= MAX_LINES
        and ast.get_docstring(node, clean=False)
    ]


def _of_files(sources: list[str]) -> list[str]:
    return [function for source in sources for function in functions(source)]


def functions_of(sources: list[str]) -> Iterator[str]:
    """`functions` of all files, in the order of the files, from one process per core."""
    jobs = [sources[i : i + _FILES_PER_JOB] for i in range(0, len(sources), _FILES_PER_JOB)]
    # A forked process would inherit the tokenizer's threads in an unknown state.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for found in pool.map(_of_files, jobs):
            yield from found
