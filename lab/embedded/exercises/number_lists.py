"""Templates over lists of numbers that combine a test, a change and a summary."""

from lab.embedded.exercises.choices import NUMBER_CHANGES, NUMBER_TESTS
from lab.embedded.exercises.template import template

_BOTH = dict(test=NUMBER_TESTS, change=NUMBER_CHANGES)

TEMPLATES = [
    template(
        "sum_<test.name>_<change.name> total_<change.name>_<test.name>",
        "numbers:ints -> int",
        """
        Return the sum of <change.of> the <test.those> in <numbers>.
        Add up <change.of> all <test.those> of <numbers>.
        Return the total of <change.of> those elements of <numbers> that are <test.are>.
        """,
        """
        return sum(<change.code> for <x> in <numbers> if <test.code>)
        ---
        <total> = 0
        for <x> in <numbers>:
            if <test.code>:
                <total> += <change.code>
        return <total>
        """,
        notes="The sum of nothing is 0.\nOther elements are ignored.",
        weight=24,
        **_BOTH,
    ),
    template(
        "<change.name>_of_<test.name> <test.name>_<change.name> list_<change.name>_of_<test.name>",
        "numbers:ints -> list[int]",
        """
        Return a list with <change.of> the <test.those> in <numbers>.
        Return <change.of> those elements of <numbers> that are <test.are>, in the same order.
        Select the <test.those> of <numbers>, and return a list of <change.of> them.
        """,
        """
        return [<change.code> for <x> in <numbers> if <test.code>]
        ---
        <result> = []
        for <x> in <numbers>:
            if <test.code>:
                <result>.append(<change.code>)
        return <result>
        """,
        notes="The order is kept.",
        weight=24,
        **_BOTH,
    ),
    template(
        "replace_<test.name>_by_<change.name> map_<test.name>_to_<change.name>",
        "numbers:ints -> list[int]",
        """
        Replace the <test.those> in <numbers> with <change.of> them, and keep the other elements.
        Return a copy of <numbers> in which <change.of> the <test.those> take their places.
        """,
        """
        return [<change.code> if <test.code> else <x> for <x> in <numbers>]
        ---
        <result> = []
        for <x> in <numbers>:
            if <test.code>:
                <result>.append(<change.code>)
            else:
                <result>.append(<x>)
        return <result>
        """,
        weight=16,
        **_BOTH,
    ),
    template(
        "largest_of_<change.name>_of_<test.name> max_<test.name>_<change.name>",
        "numbers:ints -> int | None",
        """
        Return the maximum of <change.of> the <test.those> in <numbers>, or None if there are none.
        Take <change.of> the <test.those> of <numbers> and return the largest, or None.
        """,
        """
        return max((<change.code> for <x> in <numbers> if <test.code>), default=None)
        ---
        <best> = None
        for <x> in <numbers>:
            if <test.code>:
                <value> = <change.code>
                if <best> is None or <value> > <best>:
                    <best> = <value>
        return <best>
        """,
        weight=12,
        **_BOTH,
    ),
    template(
        "distinct_<change.name>_of_<test.name> unique_<test.name>_<change.name>",
        "numbers:ints -> list[int]",
        """
        Return the different values of <change.of> the <test.those> in <numbers>, sorted.
        Collect <change.of> the <test.those> of <numbers>, sorted and without repetitions.
        """,
        """
        return sorted({<change.code> for <x> in <numbers> if <test.code>})
        ---
        <seen> = set()
        for <x> in <numbers>:
            if <test.code>:
                <seen>.add(<change.code>)
        return sorted(<seen>)
        """,
        weight=10,
        **_BOTH,
    ),
    template(
        "sum_<change.name>_up_to range_sum_<test.name>_<change.name>",
        "n:positive -> int",
        """
        Return the sum of <change.of> the <test.those> from 1 to <n>.
        Add <change.of> all <test.those> between 1 and <n>, both included.
        """,
        """
        return sum(<change.code> for <x> in range(1, <n> + 1) if <test.code>)
        ---
        <total> = 0
        for <x> in range(1, <n> + 1):
            if <test.code>:
                <total> += <change.code>
        return <total>
        """,
        weight=12,
        **_BOTH,
    ),
    template(
        "count_<test.name> how_many_<test.name> number_of_<test.name>",
        "numbers:ints -> int",
        """
        Return how many <test.those> <numbers> contains.
        Count the elements of <numbers> that are <test.are>.
        Return the number of <test.those> in <numbers>.
        """,
        """
        return sum(1 for <x> in <numbers> if <test.code>)
        ---
        <count> = 0
        for <x> in <numbers>:
            if <test.code>:
                <count> += 1
        return <count>
        ---
        return len([<x> for <x> in <numbers> if <test.code>])
        """,
        notes="An empty list gives 0.",
        weight=4,
        test=NUMBER_TESTS,
    ),
    template(
        "all_<test.name> only_<test.name> has_only_<test.name>",
        "numbers:ints -> bool",
        """
        Return True if all elements of <numbers> are <test.are>.
        Return True if <numbers> holds <test.those> only.
        """,
        """
        return all(<test.code> for <x> in <numbers>)
        ---
        for <x> in <numbers>:
            if not (<test.code>):
                return False
        return True
        """,
        notes="This holds for an empty list too.",
        weight=4,
        test=NUMBER_TESTS,
    ),
    template(
        "any_<test.name> contains_<test.name> has_<test.name>",
        "numbers:ints -> bool",
        """
        Return True if at least one element of <numbers> is among the <test.those>.
        Return True if there are any <test.those> in <numbers>.
        """,
        """
        return any(<test.code> for <x> in <numbers>)
        ---
        for <x> in <numbers>:
            if <test.code>:
                return True
        return False
        """,
        weight=4,
        test=NUMBER_TESTS,
    ),
    template(
        "positions_of_<test.name> indices_of_<test.name> where_<test.name>",
        "numbers:ints -> list[int]",
        """
        Return the indices of the <test.those> in <numbers>.
        List the positions, counted from 0, at which <numbers> holds <test.those>.
        """,
        """
        return [<i> for <i>, <x> in enumerate(<numbers>) if <test.code>]
        ---
        <result> = []
        for <i>, <x> in enumerate(<numbers>):
            if <test.code>:
                <result>.append(<i>)
        return <result>
        """,
        weight=4,
        test=NUMBER_TESTS,
    ),
    template(
        "first_<test.name> find_first_<test.name>",
        "numbers:ints -> int | None",
        """
        Return the first of the <test.those> in <numbers>, or None.
        Find the first element of <numbers> among the <test.those>, or None.
        """,
        """
        return next((<x> for <x> in <numbers> if <test.code>), None)
        ---
        for <x> in <numbers>:
            if <test.code>:
                return <x>
        return None
        """,
        weight=4,
        test=NUMBER_TESTS,
    ),
    template(
        "last_<test.name> find_last_<test.name>",
        "numbers:ints -> int | None",
        """
        Return the last of the <test.those> in <numbers>, or None if it has none.
        Search <numbers> from its end for one of the <test.those>, otherwise None.
        """,
        """
        return next((<x> for <x> in reversed(<numbers>) if <test.code>), None)
        ---
        for <x> in reversed(<numbers>):
            if <test.code>:
                return <x>
        return None
        """,
        weight=3,
        test=NUMBER_TESTS,
    ),
    template(
        "split_<test.name> partition_<test.name> separate_<test.name>",
        "numbers:ints -> tuple[list[int], list[int]]",
        """
        Split <numbers> into two lists: the <test.those>, and all others.
        Return two lists: the <test.those> of <numbers>, and the remaining elements.
        """,
        """
        <result> = [<x> for <x> in <numbers> if <test.code>]
        <rest> = [<x> for <x> in <numbers> if not (<test.code>)]
        return <result>, <rest>
        ---
        <result>, <rest> = [], []
        for <x> in <numbers>:
            if <test.code>:
                <result>.append(<x>)
            else:
                <rest>.append(<x>)
        return <result>, <rest>
        """,
        weight=4,
        test=NUMBER_TESTS,
    ),
    template(
        "take_while_<test.name> leading_<test.name>",
        "numbers:small_ints -> list[int]",
        """
        Return the first elements of <numbers>, up to one not among the <test.those>.
        Return the longest beginning of <numbers> that consists of <test.those>.
        """,
        """
        <result> = []
        for <x> in <numbers>:
            if not (<test.code>):
                break
            <result>.append(<x>)
        return <result>
        ---
        from itertools import takewhile
        ===
        return list(takewhile(lambda <x>: <test.code>, <numbers>))
        """,
        weight=3,
        test=NUMBER_TESTS,
    ),
    template(
        "mean_of_<test.name> average_of_<test.name>",
        "numbers:ints -> float",
        """
        Return the mean of the <test.those> in <numbers>, or 0.0 if there are none.
        Compute the average of the elements of <numbers> that are <test.are>, or 0.0.
        """,
        """
        <result> = [<x> for <x> in <numbers> if <test.code>]
        if not <result>:
            return 0.0
        return round(sum(<result>) / len(<result>), 2)
        ---
        <total> = 0
        <count> = 0
        for <x> in <numbers>:
            if <test.code>:
                <total> += <x>
                <count> += 1
        return round(<total> / <count>, 2) if <count> else 0.0
        """,
        notes="The result is rounded to two decimals.",
        weight=4,
        test=NUMBER_TESTS,
    ),
]
