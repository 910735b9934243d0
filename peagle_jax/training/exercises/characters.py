"""Templates about the characters of a string."""

from peagle_jax.training.exercises.choices import CHAR_CHANGES, CHAR_TESTS
from peagle_jax.training.exercises.template import template

TEMPLATES = [
    template(
        "count_<test.name> how_many_<test.name> number_of_<test.name>",
        "text:mixed -> int",
        """
        Return how many characters of <text> are <test.those>.
        Count the <test.those> in <text>.
        """,
        """
        return sum(1 for <char> in <text> if <test.code>)
        ---
        <count> = 0
        for <char> in <text>:
            if <test.code>:
                <count> += 1
        return <count>
        """,
        weight=4,
        test=CHAR_TESTS,
    ),
    template(
        "strip_<test.name> without_<test.name> delete_<test.name> drop_<test.name>",
        "text:text -> str",
        """
        Return <text> without its <test.those>.
        Delete the <test.those> from <text> and keep everything else.
        """,
        """
        return "".join(<char> for <char> in <text> if not (<test.code>))
        ---
        <result> = ""
        for <char> in <text>:
            if not (<test.code>):
                <result> += <char>
        return <result>
        """,
        weight=4,
        test=CHAR_TESTS,
    ),
    template(
        "keep_<test.name> only_<test.name> extract_<test.name>",
        "text:mixed -> str",
        """
        Return a string of the <test.those> of <text> in their order.
        Keep only the <test.those> of <text>.
        """,
        """
        return "".join(<char> for <char> in <text> if <test.code>)
        ---
        <letters> = []
        for <char> in <text>:
            if <test.code>:
                <letters>.append(<char>)
        return "".join(<letters>)
        """,
        weight=4,
        test=CHAR_TESTS,
    ),
    template(
        "write_<test.name>_<change.name> <change.name>_<test.name> change_<test.name>_to_<change.name>",
        "text:text -> str",
        """
        Return <text> with each of its <test.those> written <change.of>.
        Write the <test.those> of <text> <change.of>, and leave the other characters as they are.
        """,
        """
        return "".join(<change.code> if <test.code> else <char> for <char> in <text>)
        ---
        <result> = []
        for <char> in <text>:
            if <test.code>:
                <result>.append(<change.code>)
            else:
                <result>.append(<char>)
        return "".join(<result>)
        """,
        weight=6,
        test=CHAR_TESTS,
        change=CHAR_CHANGES,
    ),
    template(
        "positions_of_<test.name> where_<test.name> indices_of_<test.name>",
        "text:text -> list[int]",
        """
        Return the indices at which <text> has <test.those>.
        List the positions of the <test.those> in <text>, counted from 0.
        """,
        """
        return [<i> for <i>, <char> in enumerate(<text>) if <test.code>]
        ---
        <result> = []
        for <i>, <char> in enumerate(<text>):
            if <test.code>:
                <result>.append(<i>)
        return <result>
        """,
        weight=3,
        test=CHAR_TESTS,
    ),
    template(
        "has_<test.name> contains_<test.name> any_<test.name>",
        "text:mixed -> bool",
        """
        Return True if <text> contains any <test.those>.
        Return True if at least one character of <text> is <test.are>.
        """,
        """
        return any(<test.code> for <char> in <text>)
        ---
        for <char> in <text>:
            if <test.code>:
                return True
        return False
        """,
        weight=3,
        test=CHAR_TESTS,
    ),
    template(
        "longest_run_of_<test.name> longest_block_of_<test.name>",
        "text:mixed -> int",
        """
        Return the length of the longest block of consecutive <test.those> in <text>.
        Find how many <test.those> stand side by side in <text> at most.
        """,
        """
        <best> = 0
        <current> = 0
        for <char> in <text>:
            if <test.code>:
                <current> += 1
                <best> = max(<best>, <current>)
            else:
                <current> = 0
        return <best>
        """,
        test=CHAR_TESTS,
    ),
    template(
        "letter_counts char_frequencies count_characters character_tally",
        "text:word -> dict[str, int]",
        """
        Return a dictionary from each character of <text> to its number of occurrences.
        Count how often every character occurs in <text>.
        """,
        """
        <counts> = {}
        for <char> in <text>:
            <counts>[<char>] = <counts>.get(<char>, 0) + 1
        return <counts>
        ---
        from collections import Counter
        ===
        return dict(Counter(<text>))
        ---
        <counts> = {}
        for <char> in <text>:
            if <char> not in <counts>:
                <counts>[<char>] = 0
            <counts>[<char>] += 1
        return <counts>
        """,
    ),
    template(
        "most_common_letter most_frequent_char commonest_character",
        "text:word -> str",
        """
        Return the character that occurs most often in <text>. Of several, return the one that comes first.
        Find the most frequent character of <text>; the earliest one if there is a tie.
        """,
        """
        return max(<text>, key=<text>.count)
        ---
        <best> = <text>[0]
        for <char> in <text>:
            if <text>.count(<char>) > <text>.count(<best>):
                <best> = <char>
        return <best>
        """,
    ),
    template(
        "first_repeated_letter first_duplicate_char first_recurring",
        "text:text -> str | None",
        """
        Return the first character of <text> that has already occurred before, or None.
        Find the first repeated character in <text>. If all characters differ, return None.
        """,
        """
        <seen> = set()
        for <char> in <text>:
            if <char> in <seen>:
                return <char>
            <seen>.add(<char>)
        return None
        """,
    ),
    template(
        "first_single_letter first_unrepeated_char first_lonely_character",
        "text:word -> str | None",
        """
        Return the first character that occurs only once in <text>, or None if there is none.
        Find the first character of <text> that is not repeated anywhere. Return None if all are.
        """,
        """
        for <char> in <text>:
            if <text>.count(<char>) == 1:
                return <char>
        return None
        ---
        return next((<char> for <char> in <text> if <text>.count(<char>) == 1), None)
        """,
    ),
    template(
        "squeeze collapse_repeats merge_equal_neighbours squeeze_runs",
        "bits:bits -> str",
        """
        Return <bits> with each run of equal characters shortened to one.
        Remove every character of <bits> that equals the character before it.
        """,
        """
        <result> = ""
        for <char> in <bits>:
            if not <result> or <result>[-1] != <char>:
                <result> += <char>
        return <result>
        ---
        from itertools import groupby
        ===
        return "".join(<key> for <key>, _ in groupby(<bits>))
        """,
    ),
    template(
        "run_lengths runs_of encode_runs run_length_pairs",
        "bits:bits -> list[tuple[str, int]]",
        """
        Return the runs of equal characters in <bits> as pairs of a character and a length.
        Describe <bits> by its runs: a list of (character, length).
        """,
        """
        <result> = []
        for <char> in <bits>:
            if <result> and <result>[-1][0] == <char>:
                <result>[-1] = (<char>, <result>[-1][1] + 1)
            else:
                <result>.append((<char>, 1))
        return <result>
        ---
        from itertools import groupby
        ===
        return [(<key>, len(list(<groups>))) for <key>, <groups> in groupby(<bits>)]
        """,
    ),
    template(
        "shift_letters rotate_alphabet move_letters caesar",
        "word:word k:small -> str",
        """
        Return <word> with every letter replaced by the one <k> places later in the alphabet, going round after z.
        Shift each lower-case letter of <word> by <k> places; z is followed by a.
        """,
        """
        return "".join(chr((ord(<char>) - ord("a") + <k>) % 26 + ord("a")) for <char> in <word>)
        ---
        import string
        ===
        <letters> = string.ascii_lowercase
        return "".join(<letters>[(<letters>.index(<char>) + <k>) % 26] for <char> in <word>)
        """,
    ),
    template(
        "differing_positions mismatches hamming count_differences",
        "left:bits right:bits -> int",
        """
        Return at how many positions <left> and <right> differ, up to the end of the shorter one.
        Compare <left> and <right> character by character and count the differences.
        """,
        """
        return sum(a != b for a, b in zip(<left>, <right>))
        ---
        <count> = 0
        for a, b in zip(<left>, <right>):
            if a != b:
                <count> += 1
        return <count>
        """,
        notes="What the longer one has beyond the shorter one is ignored.",
    ),
    template(
        "shared_prefix common_beginning common_start",
        "left:word right:word -> str",
        """
        Return the longest beginning that <left> and <right> share.
        Find the letters with which both <left> and <right> start.
        """,
        """
        <count> = 0
        for a, b in zip(<left>, <right>):
            if a != b:
                break
            <count> += 1
        return <left>[:<count>]
        """,
    ),
]
