"""Options for slots: tests, changes and keys, each with its words and its code.

The code of a number is about `<x>`.
"""

from typing import NamedTuple


class Test(NamedTuple):
    """A condition. `those`: "even numbers"; `are`: "even"; `name`: part of a function's name."""

    name: str
    those: str
    are: str
    code: str


class Change(NamedTuple):
    """A new value. `of`: "the squares of" what follows; `name`: part of a function's name."""

    name: str
    of: str
    code: str


class Key(NamedTuple):
    """A property. `by`: "the last digit"; `name`: part of a function's name."""

    name: str
    by: str
    code: str


class Order(NamedTuple):
    """A direction of sorting. `words` and `code` follow what is sorted."""

    words: str
    code: str


ORDERS = [
    Order("", ""),
    Order(", in ascending order", ""),
    Order(", in descending order", ", reverse=True"),
    Order(", from the largest to the smallest", ", reverse=True"),
]

_SIMPLE_TESTS = [
    Test("even", "even numbers", "even", "<x> % 2 == 0"),
    Test("odd", "odd numbers", "odd", "<x> % 2 == 1"),
    Test("odd", "odd numbers", "odd", "<x> % 2 != 0"),
    Test("positive", "positive numbers", "positive", "<x> > 0"),
    Test("negative", "negative numbers", "negative", "<x> < 0"),
    Test("non_negative", "non-negative numbers", "non-negative", "<x> >= 0"),
    Test("nonzero", "numbers other than zero", "different from zero", "<x> != 0"),
    Test("two_digit", "two-digit numbers", "of two digits", "10 <= abs(<x>) <= 99"),
    Test("single_digit", "one-digit numbers", "of one digit", "abs(<x>) < 10"),
    Test("round", "multiples of ten", "multiples of ten", "<x> % 10 == 0"),
    *(
        Test(f"multiples_of_{k}", f"multiples of {k}", f"divisible by {k}", f"<x> % {k} == 0")
        for k in range(3, 10)
    ),
    *(
        Test(f"above_{k}", f"numbers greater than {k}", f"greater than {k}", f"<x> > {k}")
        for k in (3, 5, 8, 10, 15, 20)
    ),
    *(
        Test(f"below_{k}", f"numbers less than {k}", f"less than {k}", f"<x> < {k}")
        for k in (4, 7, 10, 12, 25)
    ),
    *(
        Test(f"at_least_{k}", f"numbers of at least {k}", f"at least {k}", f"<x> >= {k}")
        for k in (2, 6, 10, 18)
    ),
    *(
        Test(
            f"not_multiples_of_{k}",
            f"numbers not divisible by {k}",
            f"not divisible by {k}",
            f"<x> % {k} != 0",
        )
        for k in (3, 4, 5, 7)
    ),
    *(
        Test(
            f"ending_in_{k}",
            f"numbers whose last digit is {k}",
            f"written with the last digit {k}",
            f"abs(<x>) % 10 == {k}",
        )
        for k in (1, 3, 5, 7)
    ),
    *(
        Test(
            f"between_{a}_and_{b}",
            f"numbers from {a} to {b}",
            f"from {a} to {b}",
            f"{a} <= <x> <= {b}",
        )
        for a, b in ((1, 10), (5, 15), (0, 20), (10, 30))
    ),
]


def _both(kind: Test, size: Test) -> Test:
    """`kind` and `size` at a time: "even numbers greater than 5"."""
    those = f"{kind.those} {size.those.removeprefix('numbers ')}"
    return Test(
        f"{kind.name}_{size.name}",
        those,
        f"{kind.are} and {size.are}",
        f"{kind.code} and {size.code}",
    )


NUMBER_TESTS = _SIMPLE_TESTS + [
    _both(kind, size)
    for kind in _SIMPLE_TESTS
    if kind.name in ("even", "odd", "multiples_of_3", "multiples_of_5")
    for size in _SIMPLE_TESTS
    if size.name in ("above_5", "above_10", "above_20", "below_12", "below_25", "at_least_6")
]

NUMBER_CHANGES = [
    Change("squares", "the squares of", "<x> ** 2"),
    Change("squares", "the squares of", "<x> * <x>"),
    Change("cubes", "the cubes of", "<x> ** 3"),
    Change("doubles", "the doubles of", "2 * <x>"),
    Change("triples", "three times", "3 * <x>"),
    Change("halves", "the halves, rounded down, of", "<x> // 2"),
    Change("absolute_values", "the absolute values of", "abs(<x>)"),
    Change("last_digits", "the last digits of", "abs(<x>) % 10"),
    Change("successors", "the successors of", "<x> + 1"),
    Change("predecessors", "the predecessors of", "<x> - 1"),
    Change("digit_counts", "the numbers of digits of", "len(str(abs(<x>)))"),
    Change("digit_sums", "the digit sums of", "sum(int(d) for d in str(abs(<x>)))"),
    *(
        Change(f"remainders_by_{k}", f"the remainders modulo {k} of", f"<x> % {k}")
        for k in (3, 4, 7)
    ),
    *(
        Change(f"distances_to_{k}", f"the distances to {k} of", f"abs(<x> - {k})")
        for k in (5, 10, 100)
    ),
]

NUMBER_KEYS = [
    Key("last_digit", "the last digit", "abs(<x>) % 10"),
    Key("absolute_value", "the absolute value", "abs(<x>)"),
    Key("digit_count", "the number of digits", "len(str(abs(<x>)))"),
    Key("digit_sum", "the sum of the digits", "sum(int(d) for d in str(abs(<x>)))"),
    Key("square", "the square", "<x> ** 2"),
    *(
        Key(f"remainder_by_{k}", f"the remainder of a division by {k}", f"<x> % {k}")
        for k in (2, 3, 4, 5)
    ),
    *(Key(f"distance_to_{k}", f"the distance to {k}", f"abs(<x> - {k})") for k in (7, 10, 20)),
]


DIVISORS = [
    Order("", ""),
    Order(" except 1", " and <x> > 1"),
    Order(" smaller than itself", " and <x> < <n>"),
    Order(" that are even", " and <x> % 2 == 0"),
    Order(" that are odd", " and <x> % 2 == 1"),
    Order(" greater than 3", " and <x> > 3"),
]
"""Restrictions of the divisors of `<n>`."""
