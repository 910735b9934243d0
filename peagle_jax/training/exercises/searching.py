"""Templates about sorting, searching, and editing lists."""

from peagle_jax.training.exercises.choices import OPERATIONS, RANKS
from peagle_jax.training.exercises.template import template

TEMPLATES = [
    template(
        "binary_search find_sorted position_in_sorted",
        "numbers:sorted_ints target:limit -> int",
        """
        Return the index of <target> in <numbers>, which is sorted, or -1 if it is not there.
        Search <numbers>, which is sorted, for <target> by halving the range. The result is its index, or -1.
        """,
        """
        <low>, <high> = 0, len(<numbers>) - 1
        while <low> <= <high>:
            <middle> = (<low> + <high>) // 2
            if <numbers>[<middle>] == <target>:
                return <middle>
            if <numbers>[<middle>] < <target>:
                <low> = <middle> + 1
            else:
                <high> = <middle> - 1
        return -1
        ---
        from bisect import bisect_left
        ===
        <i> = bisect_left(<numbers>, <target>)
        if <i> < len(<numbers>) and <numbers>[<i>] == <target>:
            return <i>
        return -1
        """,
    ),
    template(
        "insert_sorted add_in_order with_inserted",
        "numbers:sorted_ints x:int -> list[int]",
        """
        Return a sorted list of the elements of <numbers> and <x>; <numbers> is sorted already.
        Insert <x> into a copy of <numbers>, which is sorted, so that the result is sorted too.
        """,
        """
        <i> = 0
        while <i> < len(<numbers>) and <numbers>[<i>] < <x>:
            <i> += 1
        return <numbers>[:<i>] + [<x>] + <numbers>[<i>:]
        ---
        import bisect
        ===
        <result> = list(<numbers>)
        bisect.insort(<result>, <x>)
        return <result>
        ---
        return sorted([*<numbers>, <x>])
        """,
    ),
    template(
        "merge_sorted merge_lists combine_sorted",
        "left:sorted_ints right:sorted_ints -> list[int]",
        """
        Merge the sorted lists <left> and <right> into one sorted list.
        Return a sorted list of all elements of <left> and <right>, which are sorted themselves.
        """,
        """
        <result> = []
        <i> = <j> = 0
        while <i> < len(<left>) and <j> < len(<right>):
            if <left>[<i>] <= <right>[<j>]:
                <result>.append(<left>[<i>])
                <i> += 1
            else:
                <result>.append(<right>[<j>])
                <j> += 1
        return <result> + <left>[<i>:] + <right>[<j>:]
        ---
        return sorted(<left> + <right>)
        """,
    ),
    template(
        "insertion_sort sort_by_insertion",
        "numbers:ints -> list[int]",
        """
        Return the elements of <numbers> in ascending order, by insertion sort.
        Sort a copy of <numbers>: each element moves to the left until the one before it is not larger.
        """,
        """
        <result> = list(<numbers>)
        for <i> in range(1, len(<result>)):
            <x> = <result>[<i>]
            <j> = <i>
            while <j> > 0 and <result>[<j> - 1] > <x>:
                <result>[<j>] = <result>[<j> - 1]
                <j> -= 1
            <result>[<j>] = <x>
        return <result>
        """,
    ),
    template(
        "bubble_sort sort_by_swapping",
        "numbers:ints -> list[int]",
        """
        Return a sorted copy of <numbers>, made by swapping neighbours that are in the wrong order.
        Sort a copy of <numbers> in ascending order with bubble sort.
        """,
        """
        <result> = list(<numbers>)
        for <i> in range(len(<result>)):
            for <j> in range(len(<result>) - 1 - <i>):
                if <result>[<j>] > <result>[<j> + 1]:
                    <result>[<j>], <result>[<j> + 1] = <result>[<j> + 1], <result>[<j>]
        return <result>
        """,
    ),
    template(
        "selection_sort sort_by_smallest",
        "numbers:ints -> list[int]",
        """
        Return the elements of <numbers> in ascending order, by taking the smallest one that is left each time.
        Sort <numbers> with selection sort; the list itself is not changed.
        """,
        """
        <rest> = list(<numbers>)
        <result> = []
        while <rest>:
            <x> = min(<rest>)
            <rest>.remove(<x>)
            <result>.append(<x>)
        return <result>
        """,
    ),
    template(
        "quick_sort sort_recursively",
        "numbers:ints -> list[int]",
        """
        Return a sorted list of the elements of <numbers>, by quicksort.
        Sort <numbers>: elements below the first one, the first one, and the others, each part sorted in the same way.
        """,
        """
        if len(<numbers>) <= 1:
            return list(<numbers>)
        pivot, *<rest> = <numbers>
        <low> = [<x> for <x> in <rest> if <x> < pivot]
        <high> = [<x> for <x> in <rest> if <x> >= pivot]
        return <name>(<low>) + [pivot] + <name>(<high>)
        """,
    ),
    template(
        "ascending_check in_order is_rising non_decreasing",
        "numbers:sorted_ints k:int -> bool",
        """
        Return True if <numbers> followed by <k> is in ascending order.
        Return True if every element of <numbers> followed by <k> is at least as large as the one before.
        """,
        """
        <result> = [*<numbers>, <k>]
        return all(a <= b for a, b in zip(<result>, <result>[1:]))
        ---
        <result> = <numbers> + [<k>]
        return <result> == sorted(<result>)
        ---
        <result> = <numbers> + [<k>]
        for <i> in range(1, len(<result>)):
            if <result>[<i>] < <result>[<i> - 1]:
                return False
        return True
        """,
    ),
    template(
        "<rank.name> <rank.name>_element get_<rank.name>",
        "numbers:some_ints -> int",
        """
        Return <rank.of> of <numbers>; equal elements count separately.
        Find <rank.of> of <numbers>, as if it were sorted.
        """,
        """
        return sorted(<numbers>)[<rank.code>]
        ---
        <result> = sorted(<numbers>)
        return <result>[<rank.code>]
        """,
        rank=RANKS,
    ),
    template(
        "largest_gap biggest_step widest_gap",
        "numbers:some_ints -> int",
        """
        Return the largest difference between neighbours in <numbers> when it is sorted.
        Find the largest gap between two neighbours of <numbers> in sorted order.
        """,
        """
        <result> = sorted(<numbers>)
        return max(b - a for a, b in zip(<result>, <result>[1:]))
        ---
        <result> = sorted(<numbers>)
        <best> = 0
        for <i> in range(1, len(<result>)):
            <best> = max(<best>, <result>[<i>] - <result>[<i> - 1])
        return <best>
        """,
    ),
    template(
        "value_range spread difference_of_extremes",
        "numbers:some_ints -> int",
        """
        Return the difference between the largest and the smallest element of <numbers>.
        Compute how far the extreme elements of <numbers> are apart.
        """,
        """
        return max(<numbers>) - min(<numbers>)
        ---
        <low> = <high> = <numbers>[0]
        for <x> in <numbers>:
            if <x> < <low>:
                <low> = <x>
            elif <x> > <high>:
                <high> = <x>
        return <high> - <low>
        """,
    ),
    template(
        "position_of_<end> index_of_<end> where_<end>",
        "numbers:some_ints -> int",
        """
        Return the index of the <end>imum of <numbers>, the first one of several.
        Find the position of the first <end>imum in <numbers>.
        """,
        """
        return <numbers>.index(<end>(<numbers>))
        ---
        return <end>(range(len(<numbers>)), key=lambda <i>: <numbers>[<i>])
        """,
        end=["max", "min"],
    ),
    template(
        "rotate_left rotated move_front_to_back",
        "numbers:some_ints k:small -> list[int]",
        """
        Return <numbers> rotated to the left by <k> places.
        Move the first element of <numbers> to the end, <k> times, in a copy of the list.
        """,
        """
        <i> = <k> % len(<numbers>)
        return <numbers>[<i>:] + <numbers>[:<i>]
        ---
        <result> = list(<numbers>)
        for _ in range(<k>):
            <result>.append(<result>.pop(0))
        return <result>
        """,
    ),
    template(
        "every_<k> take_every_<k> each_<k>_places",
        "numbers:ints -> list[int]",
        """
        Return every element of <numbers> whose index is a multiple of <k>.
        Take element 0, element <k>, and so on of <numbers>.
        """,
        """
        return <numbers>[::<k>]
        ---
        return [<x> for <i>, <x> in enumerate(<numbers>) if <i> % <k> == 0]
        ---
        <result> = []
        for <i> in range(0, len(<numbers>), <k>):
            <result>.append(<numbers>[<i>])
        return <result>
        """,
        k=[2, 3, 4],
    ),
    template(
        "chunks in_groups split_into_groups batches",
        "numbers:ints size:size -> list[list[int]]",
        """
        Return <numbers> split into lists of <size> elements; the last one may be shorter.
        Divide <numbers> into groups of <size> elements each, in order.
        """,
        """
        return [<numbers>[<i> : <i> + <size>] for <i> in range(0, len(<numbers>), <size>)]
        ---
        <groups> = []
        for <i>, <x> in enumerate(<numbers>):
            if <i> % <size> == 0:
                <groups>.append([])
            <groups>[-1].append(<x>)
        return <groups>
        """,
    ),
    template(
        "without_duplicates keep_first_occurrences deduplicate",
        "numbers:few_values -> list[int]",
        """
        Return <numbers> without repetitions, in the order of the first occurrences.
        Keep each value of <numbers> only where it occurs first.
        """,
        """
        <result> = []
        for <x> in <numbers>:
            if <x> not in <result>:
                <result>.append(<x>)
        return <result>
        ---
        return list(dict.fromkeys(<numbers>))
        ---
        <seen> = set()
        <result> = []
        for <x> in <numbers>:
            if <x> not in <seen>:
                <seen>.add(<x>)
                <result>.append(<x>)
        return <result>
        """,
    ),
    template(
        "running_<op.name> cumulative_<op.name> partial_<op.name>",
        "numbers:ints -> list[int]",
        """
        Return the <op.words> of the first element, of the first two, and so on of <numbers>.
        For every position of <numbers>, compute the <op.words> of all elements up to there.
        """,
        """
        from itertools import accumulate
        ===
        return list(accumulate(<numbers>, lambda a, b: <op.code>))
        ---
        <result> = []
        for b in <numbers>:
            if <result>:
                a = <result>[-1]
                b = <op.code>
            <result>.append(b)
        return <result>
        """,
        op=OPERATIONS,
    ),
]
