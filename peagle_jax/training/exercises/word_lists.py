"""Templates over lists of strings that combine a test, a change and a summary."""

from peagle_jax.training.exercises.choices import (
    ORDERS,
    SEPARATORS,
    WORD_CHANGES,
    WORD_KEYS,
    WORD_TESTS,
)
from peagle_jax.training.exercises.template import template

TEMPLATES = [
    template(
        "<change.name>_of_words_<test.name> words_<test.name>_<change.name>",
        "words:words -> list",
        """
        Return a list of the <test.those> in <words>: <change.of> those.
        Select the <test.those> of <words>, and return <change.of> the selected ones as a list.
        """,
        """
        return [<change.code> for <w> in <words> if <test.code>]
        ---
        <result> = []
        for <w> in <words>:
            if <test.code>:
                <result>.append(<change.code>)
        return <result>
        """,
        notes="The order is kept.",
        weight=10,
        test=WORD_TESTS,
        change=WORD_CHANGES,
    ),
    template(
        "words_<test.name> keep_words_<test.name> filter_<test.name> select_<test.name>",
        "words:words -> list[str]",
        """
        Return the <test.those> in <words>.
        Keep only the <test.those> of <words>.
        Filter <words>: the result holds its <test.those>, in the same order.
        """,
        """
        return [<w> for <w> in <words> if <test.code>]
        ---
        <result> = []
        for <w> in <words>:
            if <test.code>:
                <result>.append(<w>)
        return <result>
        ---
        return list(filter(lambda <w>: <test.code>, <words>))
        """,
        weight=4,
        test=WORD_TESTS,
    ),
    template(
        "drop_words_<test.name> remove_words_<test.name>",
        "words:words -> list[str]",
        """
        Return <words> without the <test.those>.
        Remove the <test.those> from <words>; all others stay in their order.
        """,
        """
        return [<w> for <w> in <words> if not (<test.code>)]
        ---
        <result> = []
        for <w> in <words>:
            if <test.code>:
                continue
            <result>.append(<w>)
        return <result>
        """,
        weight=3,
        test=WORD_TESTS,
    ),
    template(
        "count_words_<test.name> how_many_<test.name>",
        "words:words -> int",
        """
        Return how many <test.those> there are in <words>.
        Count the <test.those> of <words>.
        """,
        """
        return sum(1 for <w> in <words> if <test.code>)
        ---
        <count> = 0
        for <w> in <words>:
            if <test.code>:
                <count> += 1
        return <count>
        """,
        weight=3,
        test=WORD_TESTS,
    ),
    template(
        "count_<test.name>_in_text text_words_<test.name>",
        "text:text -> int",
        """
        Return how many <test.those> <text> has. Words are separated by spaces.
        Split <text> at spaces and count its <test.those>.
        """,
        """
        return sum(1 for <w> in <text>.split() if <test.code>)
        ---
        <count> = 0
        for <w> in <text>.split():
            if <test.code>:
                <count> += 1
        return <count>
        """,
        weight=3,
        test=WORD_TESTS,
    ),
    template(
        "change_words_to_<change.name> words_<change.name> map_words_<change.name>",
        "text:text -> list",
        """
        Split <text> into its words and return a list: <change.of> the words.
        """,
        """
        return [<change.code> for <w> in <text>.split()]
        ---
        <result> = []
        for <w> in <text>.split():
            <result>.append(<change.code>)
        return <result>
        """,
        weight=2,
        change=WORD_CHANGES,
    ),
    template(
        "join_words_<test.name> joined_<test.name>",
        "text:text -> str",
        """
        Return the <test.those> of <text>, joined by <sep.name>.
        Keep the <test.those> of <text> and join them with <sep.name>.
        """,
        """
        return <sep.code>.join(<w> for <w> in <text>.split() if <test.code>)
        ---
        <result> = [<w> for <w> in <text>.split() if <test.code>]
        return <sep.code>.join(<result>)
        """,
        weight=4,
        test=WORD_TESTS,
        sep=SEPARATORS,
    ),
    template(
        "any_<test.name> contains_<test.name> has_words_<test.name>",
        "words:words -> bool",
        """
        Return True if there are any <test.those> in <words>.
        Return True if <words> contains at least one of the <test.those>.
        """,
        """
        return any(<test.code> for <w> in <words>)
        ---
        for <w> in <words>:
            if <test.code>:
                return True
        return False
        """,
        weight=2,
        test=WORD_TESTS,
    ),
    template(
        "first_<test.name> find_<test.name>",
        "words:words -> str | None",
        """
        Return the first of the <test.those> in <words>, or None if there are none.
        Find the first of the <test.those> in <words>. Return None if there are none.
        """,
        """
        return next((<w> for <w> in <words> if <test.code>), None)
        ---
        for <w> in <words>:
            if <test.code>:
                return <w>
        return None
        """,
        weight=3,
        test=WORD_TESTS,
    ),
    template(
        "sort_by_<key.name> order_by_<key.name> sorted_by_<key.name>",
        "words:words -> list[str]",
        """
        Return the strings of <words> sorted by <key.by><order.words>.
        Sort <words> by <key.by><order.words>.
        """,
        """
        return sorted(<words>, key=lambda <w>: <key.code><order.code>)
        """,
        weight=4,
        notes="Strings with equal keys keep their order.",
        key=WORD_KEYS,
        order=ORDERS,
    ),
    template(
        "sort_by_<key.name>_then_alphabetically sort_by_<key.name>_and_word",
        "words:words -> list[str]",
        """
        Sort <words> by <key.by>, and those with the same value alphabetically.
        Return <words> sorted by <key.by>; ties are in alphabetical order.
        """,
        """
        return sorted(<words>, key=lambda <w>: (<key.code>, <w>))
        ---
        return sorted(sorted(<words>), key=lambda <w>: <key.code>)
        """,
        weight=2,
        key=WORD_KEYS,
    ),
    template(
        "group_by_<key.name> words_by_<key.name>",
        "words:words -> dict",
        """
        Group <words> by <key.by>.
        Return a dictionary that maps <key.by> to the list of the strings of <words> that have it.
        """,
        """
        <groups> = {}
        for <w> in <words>:
            <groups>.setdefault(<key.code>, []).append(<w>)
        return <groups>
        ---
        from collections import defaultdict
        ===
        <groups> = defaultdict(list)
        for <w> in <words>:
            <groups>[<key.code>].append(<w>)
        return dict(<groups>)
        """,
        weight=4,
        key=WORD_KEYS,
    ),
    template(
        "count_by_<key_of.name> tally_<key_of.name>",
        "words:words -> dict",
        """
        Count the strings of <words> by <key_of.by>.
        Return a dictionary that says for <key_of.by> how many strings of <words> share it.
        """,
        """
        <counts> = {}
        for <w> in <words>:
            <key> = <key_of.code>
            <counts>[<key>] = <counts>.get(<key>, 0) + 1
        return <counts>
        ---
        from collections import Counter
        ===
        return dict(Counter(<key_of.code> for <w> in <words>))
        """,
        weight=3,
        key_of=WORD_KEYS,
    ),
    template(
        "map_words_to_<key.name> <key.name>_of_words",
        "words:words -> dict",
        """
        Return a dictionary from each string of <words> to <key.by> of it.
        Map every string in <words> to <key.by>.
        """,
        """
        return {<w>: <key.code> for <w> in <words>}
        ---
        <result> = {}
        for <w> in <words>:
            <result>[<w>] = <key.code>
        return <result>
        """,
        weight=3,
        key=WORD_KEYS,
    ),
    template(
        "word_with_most_<key.name> largest_<key.name>",
        "words:words -> str",
        """
        Return the string of <words> for which <key.by> is greatest.
        Return the first string of <words> with the greatest value of <key.by>.
        """,
        """
        return max(<words>, key=lambda <w>: <key.code>)
        """,
        weight=2,
        notes="The first one of several is returned.",
        key=WORD_KEYS,
    ),
]
