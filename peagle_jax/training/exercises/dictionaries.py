"""Templates about dictionaries, pairs and records."""

from peagle_jax.training.exercises.choices import NUMBER_TESTS, ORDERS
from peagle_jax.training.exercises.template import template

TEMPLATES = [
    template(
        "keys_with_<test.name> names_with_<test.name>_values",
        "scores:counts -> list[str]",
        """
        Return the keys of <scores> whose values are <test.are>.
        List the keys of <scores> that have <test.those> as values.
        """,
        """
        return [<key> for <key>, <x> in <scores>.items() if <test.code>]
        ---
        <result> = []
        for <key>, <x> in <scores>.items():
            if <test.code>:
                <result>.append(<key>)
        return <result>
        """,
        weight=5,
        test=NUMBER_TESTS,
    ),
    template(
        "entries_with_<test.name> keep_<test.name>_values only_<test.name>_entries",
        "scores:counts -> dict[str, int]",
        """
        Return a dictionary of the entries of <scores> whose values are <test.are>.
        Keep only those entries of <scores> that have <test.those> as values.
        """,
        """
        return {<key>: <x> for <key>, <x> in <scores>.items() if <test.code>}
        ---
        <result> = {}
        for <key>, <x> in <scores>.items():
            if <test.code>:
                <result>[<key>] = <x>
        return <result>
        """,
        weight=5,
        test=NUMBER_TESTS,
    ),
    template(
        "total_of_values add_values sum_of_counts",
        "scores:counts -> int",
        """
        Return the sum of all values in <scores>.
        Add up the values of <scores>.
        """,
        """
        return sum(<scores>.values())
        ---
        <total> = 0
        for <value> in <scores>.values():
            <total> += <value>
        return <total>
        """,
    ),
    template(
        "key_of_<end>imum <end>_key key_with_<end>_value",
        "scores:counts -> str",
        """
        Return the key of <scores> that has the <end>imum of all values.
        Find the key with the <end>imal value in <scores>; the first one of several.
        """,
        """
        return <end>(<scores>, key=<scores>.get)
        ---
        return <end>(<scores>, key=lambda <key>: <scores>[<key>])
        ---
        <key>, _ = <end>(<scores>.items(), key=lambda <item>: <item>[1])
        return <key>
        """,
        end=["max", "min"],
    ),
    template(
        "keys_by_value sort_keys_by_value ranking ranked_names",
        "scores:counts -> list[str]",
        """
        Return the keys of <scores> sorted by their values<order.words>.
        Sort the keys of <scores> by value<order.words>.
        """,
        """
        return sorted(<scores>, key=lambda <key>: <scores>[<key>]<order.code>)
        ---
        <pairs> = sorted(<scores>.items(), key=lambda <item>: <item>[1]<order.code>)
        return [<key> for <key>, _ in <pairs>]
        """,
        order=ORDERS,
    ),
    template(
        "invert_dict swap_keys_and_values values_to_keys",
        "scores:counts -> dict[int, list[str]]",
        """
        Return a dictionary from each value of <scores> to the list of the keys that have it.
        Turn <scores> around: its values become keys, and its keys are collected in lists.
        """,
        """
        <result> = {}
        for <key>, <value> in <scores>.items():
            <result>.setdefault(<value>, []).append(<key>)
        return <result>
        ---
        <result> = {}
        for <key>, <value> in <scores>.items():
            if <value> not in <result>:
                <result>[<value>] = []
            <result>[<value>].append(<key>)
        return <result>
        """,
    ),
    template(
        "add_dicts merge_counts combine_tallies",
        "left:counts right:counts -> dict[str, int]",
        """
        Return a dictionary with the keys of <left> and <right>; values of a key that is in both are added.
        Merge the counts <left> and <right> by adding the values of equal keys.
        """,
        """
        <result> = dict(<left>)
        for <key>, <value> in <right>.items():
            <result>[<key>] = <result>.get(<key>, 0) + <value>
        return <result>
        ---
        <result> = <left>.copy()
        for <key> in <right>:
            if <key> in <result>:
                <result>[<key>] += <right>[<key>]
            else:
                <result>[<key>] = <right>[<key>]
        return <result>
        """,
        notes="The arguments are not changed.",
    ),
    template(
        "update_if_larger keep_larger merge_max",
        "left:counts right:counts -> dict[str, int]",
        """
        Merge <left> and <right>; for a key in both, keep the larger value.
        Return a dictionary with all keys of <left> and <right> and the larger one of their values.
        """,
        """
        <result> = dict(<left>)
        for <key>, <value> in <right>.items():
            <result>[<key>] = max(<value>, <result>.get(<key>, <value>))
        return <result>
        ---
        <result> = dict(<left>)
        for <key>, <value> in <right>.items():
            if <key> not in <result> or <value> > <result>[<key>]:
                <result>[<key>] = <value>
        return <result>
        """,
    ),
    template(
        "scale_values multiply_values times_<k>",
        "scores:counts -> dict[str, int]",
        """
        Return a copy of <scores> with every value multiplied by <k>.
        Multiply each value of <scores> by <k> and return the new dictionary.
        """,
        """
        return {<key>: <k> * <value> for <key>, <value> in <scores>.items()}
        ---
        <result> = {}
        for <key>, <value> in <scores>.items():
            <result>[<key>] = <value> * <k>
        return <result>
        """,
        k=range(2, 13),
    ),
    template(
        "sum_per_name totals_by_key add_by_name",
        "pairs:pairs -> dict[str, int]",
        """
        Return for each name in <pairs> the sum of its numbers, as a dictionary.
        Add up the numbers of <pairs> separately for every name.
        """,
        """
        <result> = {}
        for <key>, <value> in <pairs>:
            <result>[<key>] = <result>.get(<key>, 0) + <value>
        return <result>
        ---
        from collections import defaultdict
        ===
        <result> = defaultdict(int)
        for <key>, <value> in <pairs>:
            <result>[<key>] += <value>
        return dict(<result>)
        """,
    ),
    template(
        "<end>_per_name <end>_by_key",
        "pairs:pairs -> dict[str, int]",
        """
        Return a dictionary from each name in <pairs> to the <end>imum of its numbers.
        Find the <end>imum of the numbers in <pairs> for every name.
        """,
        """
        <result> = {}
        for <key>, <value> in <pairs>:
            <result>[<key>] = <end>(<value>, <result>.get(<key>, <value>))
        return <result>
        ---
        <result> = {}
        for <key>, <value> in <pairs>:
            if <key> in <result>:
                <result>[<key>] = <end>(<result>[<key>], <value>)
            else:
                <result>[<key>] = <value>
        return <result>
        """,
        end=["max", "min"],
    ),
    template(
        "values_by_name collect_numbers lists_per_name",
        "pairs:pairs -> dict[str, list[int]]",
        """
        Return a dictionary from each name in <pairs> to the list of its numbers.
        Collect the numbers of <pairs> in one list per name.
        """,
        """
        <groups> = {}
        for <key>, <value> in <pairs>:
            <groups>.setdefault(<key>, []).append(<value>)
        return <groups>
        """,
    ),
    template(
        "sort_by_second order_pairs sort_pairs",
        "pairs:pairs -> list[tuple[str, int]]",
        """
        Return <pairs> sorted by the number<order.words>.
        Sort the pairs in <pairs> by their second part<order.words>.
        """,
        """
        return sorted(<pairs>, key=lambda <item>: <item>[1]<order.code>)
        ---
        from operator import itemgetter
        ===
        return sorted(<pairs>, key=itemgetter(1)<order.code>)
        """,
        order=ORDERS,
    ),
    template(
        "names_of_at_least_<k> adults_over_<k> names_from_age_<k>",
        "people:people -> list[str]",
        """
        Return the names of those in <people> who are at least <k> years old.
        List the names of all <people> whose age is <k> or more.
        """,
        """
        return [<person>["name"] for <person> in <people> if <person>["age"] >= <k>]
        ---
        <result> = []
        for <person> in <people>:
            if <person>["age"] >= <k>:
                <result>.append(<person>["name"])
        return <result>
        """,
        k=[18, 21, 25, 30, 40, 50, 65],
    ),
    template(
        "mean_age average_age",
        "people:people -> float",
        """
        Return the mean age of <people>, rounded to one decimal.
        Compute the average of the ages in <people>, to one decimal.
        """,
        """
        return round(sum(<person>["age"] for <person> in <people>) / len(<people>), 1)
        ---
        <total> = 0
        for <person> in <people>:
            <total> += <person>["age"]
        return round(<total> / len(<people>), 1)
        """,
    ),
    template(
        "sort_people_by_<field> order_by_<field> names_by_<field>",
        "people:people -> list[str]",
        """
        Return the names of <people> in the order of their <field>s<order.words>.
        Sort <people> by <field><order.words>, and list their names.
        """,
        """
        <result> = sorted(<people>, key=lambda <person>: <person>["<field>"]<order.code>)
        return [<person>["name"] for <person> in <result>]
        """,
        field=["age", "name"],
        order=ORDERS,
    ),
    template(
        "pick_keys select_keys sub_dict",
        "scores:counts words:words -> dict[str, int]",
        """
        Return the entries of <scores> whose keys are in <words>.
        Reduce <scores> to the keys that <words> lists; others are left out.
        """,
        """
        return {<key>: <value> for <key>, <value> in <scores>.items() if <key> in <words>}
        ---
        <result> = {}
        for <key> in <scores>:
            if <key> in <words>:
                <result>[<key>] = <scores>[<key>]
        return <result>
        """,
    ),
]
