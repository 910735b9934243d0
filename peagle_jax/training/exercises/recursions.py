"""Templates about recursion and generators."""

from peagle_jax.training.exercises.choices import (
    AGGREGATES,
    NESTED_SUMS,
    NUMBER_CHANGES,
    NUMBER_TESTS,
)
from peagle_jax.training.exercises.template import template

TEMPLATES = [
    template(
        "factorial product_until fact",
        "n:natural -> int",
        """
        Return the factorial of <n>.
        Multiply all integers from 1 to <n>; for 0 the product is 1.
        """,
        """
        if <n> == 0:
            return 1
        return <n> * <name>(<n> - 1)
        ---
        <result> = 1
        for <x> in range(2, <n> + 1):
            <result> *= <x>
        return <result>
        ---
        return 1 if <n> < 2 else <n> * <name>(<n> - 1)
        """,
    ),
    template(
        "flatten flat_list flattened",
        "nested:nested -> list[int]",
        """
        Return the integers of <nested> at all depths as one flat list.
        Flatten <nested>, whose elements are integers or again such lists.
        """,
        """
        <result> = []
        for <item> in <nested>:
            if isinstance(<item>, list):
                <result>.extend(<name>(<item>))
            else:
                <result>.append(<item>)
        return <result>
        ---
        if not isinstance(<nested>, list):
            return [<nested>]
        return [<x> for <item> in <nested> for <x> in <name>(<item>)]
        """,
    ),
    template(
        "nested_<agg.name> deep_<agg.name> <agg.name>_of_nested",
        "nested:nested -> int",
        """
        Return the <agg.words> in <nested>, at all depths.
        Compute the <agg.words> in <nested> and in the lists inside it.
        """,
        """
        <total> = 0
        for <item> in <nested>:
            if isinstance(<item>, list):
                <total> += <name>(<item>)
            else:
                <total> += <agg.code>
        return <total>
        ---
        return sum(<name>(<item>) if isinstance(<item>, list) else <agg.code> for <item> in <nested>)
        """,
        agg=NESTED_SUMS,
        weight=3,
    ),
    template(
        "nesting_depth depth list_depth",
        "nested:nested -> int",
        """
        Return how deeply lists are nested in <nested>; a list without lists has depth 1.
        Compute the depth of <nested>: 1 plus the greatest depth of a list inside it.
        """,
        """
        <best> = 0
        for <item> in <nested>:
            if isinstance(<item>, list):
                <best> = max(<best>, <name>(<item>))
        return <best> + 1
        ---
        if not isinstance(<nested>, list):
            return 0
        return 1 + max((<name>(<item>) for <item> in <nested>), default=0)
        """,
    ),
    template(
        "reverse_text backwards mirror",
        "word:word -> str",
        """
        Return <word> backwards.
        Reverse the order of the letters in <word>.
        """,
        """
        if len(<word>) <= 1:
            return <word>
        return <name>(<word>[1:]) + <word>[0]
        ---
        return <word>[::-1]
        ---
        return "".join(reversed(<word>))
        ---
        <result> = ""
        for <char> in <word>:
            <result> = <char> + <result>
        return <result>
        """,
    ),
    template(
        "binomial choose combinations_count",
        "n:natural k:small -> int",
        """
        Return the number of ways to choose <k> out of <n> things.
        Compute the binomial coefficient of <n> and <k>; it is 0 if <k> exceeds <n>.
        """,
        """
        if <k> == 0:
            return 1
        if <n> == 0:
            return 0
        return <name>(<n> - 1, <k> - 1) + <name>(<n> - 1, <k>)
        ---
        import math
        ===
        return math.comb(<n>, <k>)
        """,
    ),
    template(
        "climb_stairs count_climbs ways_to_climb",
        "n:natural -> int",
        """
        Return in how many ways a stair of <n> steps can be climbed with 1 or <k> steps at a time.
        Count the sequences of the numbers 1 and <k> whose sum is <n>.
        """,
        """
        if <n> < <k>:
            return 1
        return <name>(<n> - 1) + <name>(<n> - <k>)
        ---
        ways = [1] * <k>
        while len(ways) <= <n>:
            ways.append(ways[-1] + ways[-<k>])
        return ways[<n>]
        """,
        k=[2, 3, 4],
    ),
    template(
        "sublists all_subsets power_set",
        "word:pair -> list[str]",
        """
        Return all strings that remain when any of the characters of <word> are left out, sorted.
        List in alphabetical order, repetitions included, what is left of <word> after deleting any of its characters.
        """,
        """
        <result> = [""]
        for <char> in <word>:
            <result> += [<part> + <char> for <part> in <result>]
        return sorted(<result>)
        """,
    ),
    template(
        "arrangements orderings permute",
        "word:pair -> list[str]",
        """
        Return all orders of the characters of <word>, once each and sorted.
        List the different rearrangements of <word> alphabetically.
        """,
        """
        from itertools import permutations
        ===
        return sorted({"".join(<parts>) for <parts> in permutations(<word>)})
        ---
        if len(<word>) <= 1:
            return [<word>]
        <result> = set()
        for <i>, <char> in enumerate(<word>):
            for <rest> in <name>(<word>[:<i>] + <word>[<i> + 1 :]):
                <result>.add(<char> + <rest>)
        return sorted(<result>)
        """,
    ),
    template(
        "generate_<test.name> iterate_<test.name> yield_<test.name>",
        "numbers:ints -> Iterator[int]",
        """
        Yield the <test.those> of <numbers> one after another.
        Generate those elements of <numbers> that are <test.are>.
        """,
        """
        for <x> in <numbers>:
            if <test.code>:
                yield <x>
        ---
        yield from (<x> for <x> in <numbers> if <test.code>)
        """,
        show="list({})",
        weight=4,
        test=NUMBER_TESTS,
    ),
    template(
        "generate_<change.name> iterate_<change.name> yield_<change.name>",
        "n:natural -> Iterator[int]",
        """
        Yield <change.of> 0, 1, and so on: <n> values.
        Generate <n> values: <change.of> the integers from 0 to <n> - 1.
        """,
        """
        for <x> in range(<n>):
            yield <change.code>
        """,
        show="list({})",
        weight=3,
        change=NUMBER_CHANGES,
    ),
    template(
        "count_down counting_down descend",
        "n:natural -> Iterator[int]",
        """
        Yield <n>, <n> - <k>, and so on, as long as the value is positive.
        Count down from <n> in steps of <k>, and stop before 0.
        """,
        """
        while <n> > 0:
            yield <n>
            <n> -= <k>
        ---
        yield from range(<n>, 0, -<k>)
        """,
        show="list({})",
        k=[1, 2, 3, 4],
    ),
    template(
        "repeat_each each_<k>_times stutter",
        "word:word -> Iterator[str]",
        """
        Yield every letter of <word> <k> times in a row.
        Go through <word> and yield each of its letters <k> times.
        """,
        """
        for <char> in <word>:
            for _ in range(<k>):
                yield <char>
        ---
        return (<char> for <char> in <word> for _ in range(<k>))
        """,
        show='"".join({})',
        k=[2, 3, 4],
    ),
    template(
        "sliding_<agg.name> window_<agg.name> moving_<agg.name>",
        "numbers:ints size:size -> Iterator[int]",
        """
        Yield the <agg.words> of each <size> consecutive elements of <numbers>.
        Move a window of <size> elements over <numbers> and yield the <agg.words> of each.
        """,
        """
        for <i> in range(len(<numbers>) - <size> + 1):
            yield <agg.code>(<numbers>[<i> : <i> + <size>])
        """,
        show="list({})",
        weight=3,
        agg=AGGREGATES,
    ),
]
