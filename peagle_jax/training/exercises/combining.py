"""Templates about two lists, pairs of elements, and sets."""

from peagle_jax.training.exercises.choices import (
    ELEMENT_OPERATIONS,
    HOW_OFTEN,
    NUMBER_TESTS,
    PLACES,
    SET_OPERATIONS,
)
from peagle_jax.training.exercises.template import template

TEMPLATES = [
    template(
        "elementwise_<op.name> pairwise_<op.name> <op.name>_of_pairs",
        "left:ints right:ints -> list[int]",
        """
        Return a list with the <op.words> of the elements at each position of <left> and <right>.
        Combine <left> and <right> element by element: the result holds the <op.words> of each two. The shorter list decides the length.
        """,
        """
        return [<op.code> for a, b in zip(<left>, <right>)]
        ---
        <result> = []
        for a, b in zip(<left>, <right>):
            <result>.append(<op.code>)
        return <result>
        ---
        <result> = []
        for <i> in range(min(len(<left>), len(<right>))):
            a, b = <left>[<i>], <right>[<i>]
            <result>.append(<op.code>)
        return <result>
        """,
        weight=4,
        op=ELEMENT_OPERATIONS,
    ),
    template(
        "neighbour_<op.name> <op.name>_of_neighbours adjacent_<op.name>",
        "numbers:ints -> list[int]",
        """
        Return the <op.words> of each element of <numbers> and the one after it.
        For every two neighbours in <numbers>, compute their <op.words>.
        """,
        """
        return [<op.code> for a, b in zip(<numbers>, <numbers>[1:])]
        ---
        <result> = []
        for <i> in range(len(<numbers>) - 1):
            a, b = <numbers>[<i>], <numbers>[<i> + 1]
            <result>.append(<op.code>)
        return <result>
        ---
        from itertools import pairwise
        ===
        return [<op.code> for a, b in pairwise(<numbers>)]
        """,
        weight=3,
        op=ELEMENT_OPERATIONS,
    ),
    template(
        "in_<sets.name> elements_in_<sets.name> values_of_<sets.name>",
        "left:few_values right:few_values -> list[int]",
        """
        Return a sorted list of the different values <sets.words>.
        List, in ascending order and once each, the values <sets.words>.
        """,
        """
        return sorted(set(<left>) <sets.code> set(<right>))
        """,
        sets=SET_OPERATIONS,
        weight=4,
    ),
    template(
        "is_subset all_in_other contains_all",
        "left:few_values right:few_values -> bool",
        """
        Return True if each value of <left> also occurs in <right>.
        Return True if <right> has all the values that <left> has.
        """,
        """
        return set(<left>) <= set(<right>)
        ---
        return all(<x> in <right> for <x> in <left>)
        ---
        for <x> in <left>:
            if <x> not in <right>:
                return False
        return True
        """,
    ),
    template(
        "all_different has_no_repeats are_distinct",
        "numbers:few_values -> bool",
        """
        Return True if no value occurs more than once in <numbers>.
        Return True if all elements of <numbers> are different.
        """,
        """
        return len(set(<numbers>)) == len(<numbers>)
        ---
        <seen> = set()
        for <x> in <numbers>:
            if <x> in <seen>:
                return False
            <seen>.add(<x>)
        return True
        """,
    ),
    template(
        "repeated_values duplicates find_repeated",
        "numbers:few_values -> list[int]",
        """
        Return the values that occur <cond.words> in <numbers>, in ascending order.
        List the values that <numbers> holds <cond.words>, sorted and once each.
        """,
        """
        return sorted(<x> for <x> in set(<numbers>) if <numbers>.count(<x>) <cond.code>)
        ---
        from collections import Counter
        ===
        <counts> = Counter(<numbers>)
        return sorted(<x> for <x>, <count> in <counts>.items() if <count> <cond.code>)
        """,
        cond=HOW_OFTEN,
    ),
    template(
        "commonest_value mode most_frequent",
        "numbers:few_values -> int",
        """
        Return the value that occurs most often in <numbers>, the smallest one of several.
        Find the most frequent value of <numbers>. In case of a tie, choose the smallest.
        """,
        """
        return max(sorted(set(<numbers>)), key=<numbers>.count)
        ---
        <best> = None
        for <x> in sorted(<numbers>):
            if <best> is None or <numbers>.count(<x>) > <numbers>.count(<best>):
                <best> = <x>
        return <best>
        """,
    ),
    template(
        "pair_with_<op.name> find_pair_<op.name>",
        "numbers:small_ints target:natural -> tuple[int, int] | None",
        """
        Return the first two elements of <numbers> that have the <op.words> <target>, or None. The earlier element comes first.
        Find two elements of <numbers> whose <op.words> is <target>. Return None if there are no such elements.
        """,
        """
        for <i>, a in enumerate(<numbers>):
            for b in <numbers>[<i> + 1 :]:
                if <op.code> == <target>:
                    return a, b
        return None
        ---
        from itertools import combinations
        ===
        for a, b in combinations(<numbers>, 2):
            if <op.code> == <target>:
                return a, b
        return None
        """,
        weight=3,
        op=ELEMENT_OPERATIONS,
    ),
    template(
        "count_pairs_<op.name> pairs_with_<op.name>",
        "numbers:small_ints target:natural -> int",
        """
        Return how many pairs of elements at different positions of <numbers> have the <op.words> <target>. The earlier element is the first of the pair.
        Count the pairs in <numbers>, the earlier element first, whose <op.words> equals <target>.
        """,
        """
        <count> = 0
        for <i> in range(len(<numbers>)):
            for <j> in range(<i> + 1, len(<numbers>)):
                a, b = <numbers>[<i>], <numbers>[<j>]
                if <op.code> == <target>:
                    <count> += 1
        return <count>
        ---
        from itertools import combinations
        ===
        return sum(1 for a, b in combinations(<numbers>, 2) if <op.code> == <target>)
        """,
        weight=3,
        op=ELEMENT_OPERATIONS,
    ),
    template(
        "alternate_lists zip_flat take_in_turn",
        "left:ints right:ints -> list[int]",
        """
        Return the elements of <left> and <right> in turn, as far as the shorter list goes.
        Take an element from <left>, one from <right>, and so on, until a list ends.
        """,
        """
        <result> = []
        for <pair> in zip(<left>, <right>):
            <result>.extend(<pair>)
        return <result>
        ---
        return [<x> for <pair> in zip(<left>, <right>) for <x> in <pair>]
        """,
    ),
    template(
        "dot_product weighted_sum sum_of_products",
        "left:ints right:ints -> int",
        """
        Return the sum of the products of the elements at equal positions of <left> and <right>.
        Multiply <left> and <right> element by element, and add the products.
        """,
        """
        return sum(a * b for a, b in zip(<left>, <right>))
        ---
        <total> = 0
        for a, b in zip(<left>, <right>):
            <total> += a * b
        return <total>
        """,
    ),
    template(
        "manhattan_distance city_distance grid_steps",
        "left:point right:point -> int",
        """
        Return how many steps along the axes lead from <left> to <right>.
        Compute the sum of the distances between <left> and <right> in x and in y.
        """,
        """
        return abs(<left>[0] - <right>[0]) + abs(<left>[1] - <right>[1])
        ---
        return sum(abs(a - b) for a, b in zip(<left>, <right>))
        """,
    ),
    template(
        "swap_pairs exchange_neighbours flip_pairs",
        "numbers:ints -> list[int]",
        """
        Return <numbers> with the first and second element exchanged, the third and fourth, and so on; a single last one stays.
        Swap each two neighbours of <numbers>, beginning with the first two. An element that is left over keeps its place.
        """,
        """
        <result> = list(<numbers>)
        for <i> in range(0, len(<result>) - 1, 2):
            <result>[<i>], <result>[<i> + 1] = <result>[<i> + 1], <result>[<i>]
        return <result>
        """,
    ),
    template(
        "move_<test.name>_to_<place.name> <test.name>_<place.name>",
        "numbers:ints -> list[int]",
        """
        Return <numbers> with its <test.those> moved to the <place.words>; otherwise the order is kept.
        Move the <test.those> of <numbers> to the <place.words> without changing the order among them or the others.
        """,
        """
        <parts> = [<x> for <x> in <numbers> if <test.code>]
        <rest> = [<x> for <x> in <numbers> if not (<test.code>)]
        return <place.code>
        ---
        <parts>, <rest> = [], []
        for <x> in <numbers>:
            if <test.code>:
                <parts>.append(<x>)
            else:
                <rest>.append(<x>)
        return <place.code>
        """,
        weight=4,
        test=NUMBER_TESTS,
        place=PLACES,
    ),
]
