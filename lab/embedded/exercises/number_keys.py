"""Templates that sort, group and count numbers by a property."""

from lab.embedded.exercises.choices import NUMBER_KEYS, ORDERS
from lab.embedded.exercises.template import template

TEMPLATES = [
    template(
        "group_by_<key.name> numbers_by_<key.name>",
        "numbers:ints -> dict[int, list[int]]",
        """
        Group the elements of <numbers> by <key.by>.
        Return a dictionary from <key.by> to the list of the elements of <numbers> that have it.
        """,
        """
        <groups> = {}
        for <x> in <numbers>:
            <groups>.setdefault(<key.code>, []).append(<x>)
        return <groups>
        ---
        <groups> = {}
        for <x> in <numbers>:
            <value> = <key.code>
            if <value> not in <groups>:
                <groups>[<value>] = []
            <groups>[<value>].append(<x>)
        return <groups>
        """,
        weight=4,
        key=NUMBER_KEYS,
    ),
    template(
        "sort_by_<key.name> order_by_<key.name> sorted_by_<key.name>",
        "numbers:ints -> list[int]",
        """
        Return the elements of <numbers> sorted by <key.by><order.words>.
        Sort <numbers> by <key.by><order.words>.
        """,
        """
        return sorted(<numbers>, key=lambda <x>: <key.code><order.code>)
        """,
        notes="Elements with equal keys keep their order.",
        weight=5,
        key=NUMBER_KEYS,
        order=ORDERS,
    ),
    template(
        "largest_by_<key.name> max_by_<key.name>",
        "numbers:some_ints -> int",
        """
        Return the element of <numbers> for which <key.by> is largest.
        Return the first element of <numbers> with the greatest value of <key.by>.
        """,
        """
        return max(<numbers>, key=lambda <x>: <key.code>)
        ---
        return sorted(<numbers>, key=lambda <x>: <key.code>, reverse=True)[0]
        """,
        weight=2,
        key=NUMBER_KEYS,
    ),
    template(
        "count_by_<key.name> tally_by_<key.name>",
        "numbers:ints -> dict[int, int]",
        """
        Count the elements of <numbers> by <key.by>.
        Return a dictionary that says for <key.by> how many elements of <numbers> have it.
        """,
        """
        <counts> = {}
        for <x> in <numbers>:
            <value> = <key.code>
            <counts>[<value>] = <counts>.get(<value>, 0) + 1
        return <counts>
        ---
        from collections import Counter
        ===
        return dict(Counter(<key.code> for <x> in <numbers>))
        """,
        weight=3,
        key=NUMBER_KEYS,
    ),
]
