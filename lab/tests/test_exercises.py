"""Generated exercises (`python -m lab.embedded data --exercises`)."""

import ast
import doctest
import re
from random import Random

import pytest

from lab.embedded import exercises
from lab.embedded.exercises import TEMPLATES, making
from lab.embedded.exercises.template import Template, template
from peagle_jax.config import ConfigError

COUNT = 1000


@pytest.fixture(scope="module")
def documents():
    return exercises.exercises(COUNT, seed=0)


def main_function(document: str) -> ast.FunctionDef:
    """The function that an exercise is about: the last one."""
    return ast.parse(document).body[-1]


def test_a_seed_gives_the_same_documents_and_another_seed_others(documents):
    assert exercises.exercises(300, seed=0) == documents[:300]
    assert len(set(exercises.exercises(300, seed=1)) & set(documents)) < 30


def test_documents_are_different_functions_with_docstrings(documents):
    assert len(set(documents)) == COUNT
    for document in documents:
        assert document.endswith("\n")
        assert not document.endswith("\n\n")
        assert ast.get_docstring(main_function(document))
        assert not re.search(r"<[a-z]+(\.[a-z]+)?>|[ \t]\n", document)
    names = {main_function(document).name for document in documents}
    assert len(names) > COUNT / 2


def test_every_template_gives_functions_whose_examples_are_right():
    rng = Random(0)
    num_examples = 0
    for one in TEMPLATES:
        for _ in range(4):
            document = making.document(one, rng)
            function = main_function(document)
            namespace = {}
            exec(document, namespace)
            text = namespace[function.name].__doc__
            examples = doctest.DocTestParser().get_doctest(text, namespace, function.name, "", 0)
            result = doctest.DocTestRunner(verbose=False).run(examples, out=lambda line: None)
            assert result.failed == 0, document
            num_examples += result.attempted
    assert num_examples > 40


def results_of_bodies(one: Template, rng: Random) -> set[tuple[str, ...]]:
    """Results of each body of a template for the same arguments, as text."""
    drawn = making.Drawn(one, rng)
    drawn["name"] = name = making.fill(one.names[0], drawn)
    head = f"def {name}({', '.join(drawn[param] for param, _ in one.params)}):"
    calls = [
        one.show.format(f"{name}({', '.join(repr(kind.draw(rng)) for _, kind in one.params)})")
        for _ in range(4)
    ]
    found = set()
    for above, body in one.bodies:
        namespace = {}
        text = making.fill(f"{above}\n{head}\n{making.indented(body)}\n", drawn)
        exec(text, namespace)
        found.add(tuple(repr(eval(call, namespace)) for call in calls))
    return found


def test_the_bodies_of_a_template_give_equal_results():
    rng = Random(0)
    for one in TEMPLATES:
        for _ in range(5):
            assert len(results_of_bodies(one, rng)) == 1, one.names


def test_too_many_documents_for_the_templates_are_an_error(monkeypatch):
    single = template("two", " -> int", "Return 2.", "return 2")
    monkeypatch.setattr(exercises, "TEMPLATES", [single])
    with pytest.raises(ConfigError, match="ask for fewer"):
        exercises.exercises(1000, seed=0)
