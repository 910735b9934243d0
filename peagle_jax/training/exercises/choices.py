"""Options for slots: tests, changes and keys, each with its words for names and docstrings and its code.

The code of a number is about `<x>`, of a word about `<w>`, of a character about `<char>`.
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
    *(Test(f"multiples_of_{k}", f"multiples of {k}", f"divisible by {k}", f"<x> % {k} == 0") for k in range(3, 10)),
    *(Test(f"above_{k}", f"numbers greater than {k}", f"greater than {k}", f"<x> > {k}") for k in (3, 5, 8, 10, 15, 20)),
    *(Test(f"below_{k}", f"numbers less than {k}", f"less than {k}", f"<x> < {k}") for k in (4, 7, 10, 12, 25)),
    *(Test(f"at_least_{k}", f"numbers of at least {k}", f"at least {k}", f"<x> >= {k}") for k in (2, 6, 10, 18)),
    *(Test(f"not_multiples_of_{k}", f"numbers not divisible by {k}", f"not divisible by {k}", f"<x> % {k} != 0") for k in (3, 4, 5, 7)),
    *(Test(f"ending_in_{k}", f"numbers whose last digit is {k}", f"written with the last digit {k}", f"abs(<x>) % 10 == {k}") for k in (1, 3, 5, 7)),
    *(Test(f"between_{a}_and_{b}", f"numbers from {a} to {b}", f"from {a} to {b}", f"{a} <= <x> <= {b}") for a, b in ((1, 10), (5, 15), (0, 20), (10, 30))),
]  # fmt: skip


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
    *(Change(f"remainders_by_{k}", f"the remainders modulo {k} of", f"<x> % {k}") for k in (3, 4, 7)),
    *(Change(f"distances_to_{k}", f"the distances to {k} of", f"abs(<x> - {k})") for k in (5, 10, 100)),
]  # fmt: skip

NUMBER_KEYS = [
    Key("last_digit", "the last digit", "abs(<x>) % 10"),
    Key("absolute_value", "the absolute value", "abs(<x>)"),
    Key("digit_count", "the number of digits", "len(str(abs(<x>)))"),
    Key("digit_sum", "the sum of the digits", "sum(int(d) for d in str(abs(<x>)))"),
    Key("square", "the square", "<x> ** 2"),
    *(Key(f"remainder_by_{k}", f"the remainder of a division by {k}", f"<x> % {k}") for k in (2, 3, 4, 5)),
    *(Key(f"distance_to_{k}", f"the distance to {k}", f"abs(<x> - {k})") for k in (7, 10, 20)),
]  # fmt: skip


class Separator(NamedTuple):
    """A text between parts. `name`: "a comma"."""

    name: str
    code: str


SEPARATORS = [
    Separator("commas", '","'),
    Separator("hyphens", '"-"'),
    Separator("spaces", '" "'),
    Separator("underscores", '"_"'),
    Separator("slashes", '"/"'),
    Separator("semicolons", '";"'),
    Separator("a comma and a space", '", "'),
    Separator("a vertical bar", '"|"'),
]

WORD_TESTS = [
    Test("capitalized", "words that begin with a capital letter", "capitalized", "<w>[0].isupper()"),
    Test("lowercase", "lower-case words", "written in lower case", "<w>.islower()"),
    Test("mirrored", "words that read the same backwards", "the same backwards", "<w> == <w>[::-1]"),
    Test("with_double_letter", "words with two equal letters in a row", "with a double letter",
         "any(a == b for a, b in zip(<w>, <w>[1:]))"),
    Test("even_length", "words of even length", "of even length", "len(<w>) % 2 == 0"),
    Test("odd_length", "words of odd length", "of odd length", "len(<w>) % 2 == 1"),
    *(Test(f"longer_than_{k}", f"words of more than {k} letters", f"longer than {k}", f"len(<w>) > {k}") for k in range(2, 8)),
    *(Test(f"shorter_than_{k}", f"words of fewer than {k} letters", f"shorter than {k}", f"len(<w>) < {k}") for k in range(3, 9)),
    *(Test(f"of_length_{k}", f"words of exactly {k} letters", f"of length {k}", f"len(<w>) == {k}") for k in range(3, 8)),
    *(Test(f"with_{c}", f'words that contain "{c}"', f'words with "{c}"', f'"{c}" in <w>') for c in "aeiorn"),
    *(Test(f"without_{c}", f'words without the letter "{c}"', f'free of "{c}"', f'"{c}" not in <w>') for c in "aeost"),
    *(Test(f"starting_with_{c}", f'words that start with "{c}"', f'words starting with "{c}"', f'<w>.startswith("{c}")') for c in "abcmrst"),
    *(Test(f"ending_with_{c}", f'words that end with "{c}"', f'words ending with "{c}"', f'<w>.endswith("{c}")') for c in "denrty"),
]  # fmt: skip

WORD_CHANGES = [
    Change("lengths", "the lengths of", "len(<w>)"),
    Change("upper_cased", "the upper-case forms of", "<w>.upper()"),
    Change("lower_cased", "the lower-case forms of", "<w>.lower()"),
    Change("capitalized", "the capitalized forms of", "<w>.capitalize()"),
    Change("swapped_case", "with upper and lower case swapped,", "<w>.swapcase()"),
    Change("reversed", "with their letters reversed,", "<w>[::-1]"),
    Change("first_letters", "the first letters of", "<w>[0]"),
    Change("last_letters", "the last letters of", "<w>[-1]"),
    Change("sorted_letters", "with their letters in alphabetical order,", '"".join(sorted(<w>))'),
    Change("doubled", "repeated twice,", "<w> * 2"),
    *(Change(f"prefixes_of_{k}", f"the first {k} letters of", f"<w>[:{k}]") for k in (2, 3)),
    *(Change(f"suffixes_of_{k}", f"the last {k} letters of", f"<w>[-{k}:]") for k in (2, 3)),
    Change("quoted", "in double quotes,", "f'\"{<w>}\"'"),
    Change("with_lengths", "paired with their lengths,", "(<w>, len(<w>))"),
]  # fmt: skip

WORD_KEYS = [
    Key("length", "the length", "len(<w>)"),
    Key("last_letter", "the last letter", "<w>[-1]"),
    Key("first_letter", "the first letter", "<w>[0]"),
    Key("first_letter", "the first letter in lower case", "<w>[0].lower()"),
    Key("lower_case", "the lower-case form", "<w>.lower()"),
    Key("reversed_word", "the reversed word", "<w>[::-1]"),
    Key("distinct_letters", "the number of different letters", "len(set(<w>))"),
    *(Key(f"count_of_{c}", f'the number of times that "{c}" occurs', f'<w>.count("{c}")') for c in "aeor"),
    Key("vowel_number", "the number of vowels", 'sum(c in "aeiou" for c in <w>)'),
]  # fmt: skip

CHAR_TESTS = [
    Test("vowels", "vowels", "a vowel", '<char> in "aeiouAEIOU"'),
    Test("vowels", "vowels", "a vowel", '<char>.lower() in "aeiou"'),
    Test("consonants", "consonants", "a consonant", '<char>.isalpha() and <char>.lower() not in "aeiou"'),
    Test("uppercase", "upper-case letters", "an upper-case letter", "<char>.isupper()"),
    Test("lowercase", "lower-case letters", "a lower-case letter", "<char>.islower()"),
    Test("digits", "digits", "a digit", "<char>.isdigit()"),
    Test("letters", "letters", "a letter", "<char>.isalpha()"),
    Test("alphanumeric", "letters and digits", "a letter or a digit", "<char>.isalnum()"),
    Test("spaces", "spaces", "a space", '<char> == " "'),
    Test("whitespace", "white-space characters", "white space", "<char>.isspace()"),
    Test("punctuation", "punctuation marks", "a punctuation mark", '<char> in ".,;:!?"'),
    Test("special", "characters that are neither letters nor digits", "neither a letter nor a digit", "not <char>.isalnum()"),
    Test("even_digits", "even digits", "an even digit", '<char> in "02468"'),
    Test("hyphens", "hyphens and underscores", "a hyphen or an underscore", '<char> in "-_"'),
    *(Test(f"letter_{c}", f'occurrences of "{c}" in either case', f'"{c}" in either case', f'<char>.lower() == "{c}"') for c in "aelost"),
]  # fmt: skip

CHAR_CHANGES = [
    Change("upper", "in upper case", "<char>.upper()"),
    Change("swapped", "in the other case", "<char>.swapcase()"),
    Change("doubled", "twice", "<char> * 2"),
    Change("starred", 'as "*"', '"*"'),
    Change("dashed", 'as "-"', '"-"'),
    Change("underscored", 'as "_"', '"_"'),
    Change("hashed", 'as "#"', '"#"'),
    Change("bracketed", "in brackets", 'f"[{<char>}]"'),
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

PERCENT = [Order("increased", "+"), Order("reduced", "-")]


class Labels(NamedTuple):
    """Names of three classes from the lowest to the highest."""

    a: str
    b: str
    c: str


THREE_LABELS = [
    Labels("low", "medium", "high"),
    Labels("small", "medium", "large"),
    Labels("cold", "mild", "hot"),
    Labels("young", "adult", "old"),
    Labels("below", "inside", "above"),
    Labels("short", "normal", "long"),
    Labels("cheap", "fair", "expensive"),
]


class DigitChoice(NamedTuple):
    """Some of the digits: the rest of a generator over characters, and a test of an integer `<digit>`."""

    words: str
    code: str
    test: str


DIGIT_CHOICES = [
    DigitChoice("even ", " if int(<digit>) % 2 == 0", "<digit> % 2 == 0"),
    DigitChoice("odd ", " if int(<digit>) % 2 == 1", "<digit> % 2 == 1"),
    DigitChoice("small (below 5) ", " if int(<digit>) < 5", "<digit> < 5"),
    DigitChoice("large (above 5) ", " if int(<digit>) > 5", "<digit> > 5"),
]
DIGIT_ENDS = [Order("highest", ""), Order("lowest", "[::-1]")]
FIBONACCI_STARTS = [Order("0 and 1", "0, 1"), Order("1 and 1", "1, 1"), Order("1 and 2", "1, 2")]

RANKS = [
    Change("second_largest", "the second largest element", "-2"),
    Change("second_smallest", "the second smallest element", "1"),
    Change("third_largest", "the third largest element", "-3"),
    Change("third_smallest", "the third smallest element", "2"),
]


class Operation(NamedTuple):
    """An operation on `a` and `b`; `words` names the result for many."""

    name: str
    words: str
    code: str


OPERATIONS = [
    Operation("sums", "sum", "a + b"),
    Operation("products", "product", "a * b"),
    Operation("minima", "minimum", "min(a, b)"),
]
ELEMENT_OPERATIONS = [
    Operation("sums", "sum", "a + b"),
    Operation("differences", "difference", "a - b"),
    Operation("distances", "absolute difference", "abs(a - b)"),
    Operation("products", "product", "a * b"),
    Operation("maxima", "maximum", "max(a, b)"),
    Operation("minima", "minimum", "min(a, b)"),
]
"""Operations on two elements."""

AGGREGATES = [
    Operation("sums", "sum", "sum"),
    Operation("maxima", "maximum", "max"),
    Operation("minima", "minimum", "min"),
]
LENGTHS = [
    Operation("lengths", "sum of the lengths", "sum"),
    Operation("longest_length", "greatest length", "max"),
    Operation("shortest_length", "smallest length", "min"),
]
SET_OPERATIONS = [
    Operation("both", "that occur in both <left> and <right>", "&"),
    Operation("either", "that occur in <left>, in <right>, or in both", "|"),
    Operation("first_only", "that occur in <left> but not in <right>", "-"),
    Operation("exactly_one", "that occur in exactly one of <left> and <right>", "^"),
]
HOW_OFTEN = [
    Order("more than once", "> 1"),
    Order("exactly once", "== 1"),
    Order("exactly twice", "== 2"),
    Order("at least three times", ">= 3"),
]
PLACES = [
    Operation("front", "front", "<parts> + <rest>"),
    Operation("end", "end", "<rest> + <parts>"),
]
NESTED_SUMS = [
    Operation("sum", "sum of the integers", "<item>"),
    Operation("count", "number of integers", "1"),
    Operation("square_sum", "sum of the squares of the integers", "<item> ** 2"),
    Operation("even_count", "number of even integers", "int(<item> % 2 == 0)"),
]
