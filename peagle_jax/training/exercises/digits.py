"""Templates about digits, bases and sequences of integers."""

from peagle_jax.training.exercises.choices import DIGIT_CHOICES, DIGIT_ENDS, FIBONACCI_STARTS
from peagle_jax.training.exercises.template import template

TEMPLATES = [
    template(
        "digit_sum sum_digits add_digits_of",
        "n:large -> int",
        """
        Return the sum of the <which.words>digits of <n>.
        Add up the <which.words>decimal digits of <n>.
        """,
        """
        return sum(int(<digit>) for <digit> in str(<n>)<which.code>)
        ---
        <total> = 0
        for <char> in str(<n>):
            <digit> = int(<char>)
            <total> += <digit> if <which.test> else 0
        return <total>
        """,
        weight=3,
        which=DIGIT_CHOICES,
    ),
    template(
        "digit_product multiply_digits product_of_all_digits",
        "n:large -> int",
        """
        Return the product of the digits of <n>.
        Multiply all digits of <n>.
        """,
        """
        <result> = 1
        for <digit> in str(<n>):
            <result> *= int(<digit>)
        return <result>
        ---
        import math
        ===
        return math.prod(int(<digit>) for <digit> in str(<n>))
        ---
        <result> = 1
        while <n> > 0:
            <result> *= <n> % 10
            <n> //= 10
        return <result>
        """,
        notes="A digit 0 makes the result 0.",
    ),
    template(
        "count_digit_<k> how_often_digit_<k>",
        "n:large -> int",
        """
        Return how often the digit <k> occurs in <n>.
        Count the digits of <n> that are <k>.
        """,
        """
        return str(<n>).count("<k>")
        ---
        <count> = 0
        while <n> > 0:
            if <n> % 10 == <k>:
                <count> += 1
            <n> //= 10
        return <count>
        """,
        k=[0, 1, 2, 3, 5, 7, 9],
    ),
    template(
        "reverse_number reversed_digits flip_digits",
        "n:large -> int",
        """
        Return the number that has the digits of <n> in reverse order.
        Reverse the digits of <n>; zeros at the front are dropped.
        """,
        """
        return int(str(<n>)[::-1])
        ---
        <result> = 0
        while <n> > 0:
            <result> = <result> * 10 + <n> % 10
            <n> //= 10
        return <result>
        """,
    ),
    template(
        "digital_root repeated_digit_sum reduce_digits",
        "n:large -> int",
        """
        Return the digit that remains when <n> is replaced by its digit sum again and again.
        Sum the digits of <n>, then the digits of that sum, until one digit is left.
        """,
        """
        while <n> >= 10:
            <n> = sum(int(<digit>) for <digit> in str(<n>))
        return <n>
        ---
        if <n> < 10:
            return <n>
        return <name>(sum(int(<digit>) for <digit> in str(<n>)))
        """,
    ),
    template(
        "digit_list split_digits list_of_digits",
        "n:large -> list[int]",
        """
        Return the digits of <n> as a list, the <end.words> first.
        Split <n> into its digits, beginning with the <end.words>.
        """,
        """
        return [int(<digit>) for <digit> in str(<n>)<end.code>]
        """,
        end=DIGIT_ENDS,
    ),
    template(
        "number_from_digits join_digits digits_to_number",
        "numbers:small_ints -> int",
        """
        Return the integer whose decimal digits are the elements of <numbers>.
        Read <numbers> as the digits of one number, the most significant first.
        """,
        """
        <result> = 0
        for <digit> in <numbers>:
            <result> = <result> * 10 + <digit>
        return <result>
        ---
        return int("".join(str(<digit>) for <digit> in <numbers>))
        """,
    ),
    template(
        "in_base to_base digits_in_base write_in_base",
        "n:positive base:base -> str",
        """
        Return <n> written in the number system with base <base>.
        Write the positive integer <n> with digits of base <base>.
        """,
        """
        <result> = ""
        while <n> > 0:
            <result> = str(<n> % <base>) + <result>
            <n> //= <base>
        return <result>
        ---
        if <n> < <base>:
            return str(<n>)
        return <name>(<n> // <base>, <base>) + str(<n> % <base>)
        ---
        <parts> = []
        while <n>:
            <n>, <rest> = divmod(<n>, <base>)
            <parts>.append(str(<rest>))
        return "".join(reversed(<parts>))
        """,
    ),
    template(
        "binary_value bits_to_number from_bits",
        "bits:bits -> int",
        """
        Return the integer that <bits> stands for in the binary system.
        Read <bits> as a binary number.
        """,
        """
        return int(<bits>, 2)
        ---
        <result> = 0
        for <char> in <bits>:
            <result> = 2 * <result> + int(<char>)
        return <result>
        """,
    ),
    template(
        "count_ones set_bits number_of_one_bits",
        "n:positive -> int",
        """
        Return how many ones the binary form of <n> has.
        Count the bits of <n> that are set.
        """,
        """
        return bin(<n>).count("1")
        ---
        <count> = 0
        while <n>:
            <count> += <n> & 1
            <n> >>= 1
        return <count>
        ---
        return <n>.bit_count()
        """,
    ),
    template(
        "is_digit_sorted has_rising_digits digits_ascend",
        "n:large -> bool",
        """
        Return True if no digit of <n> is smaller than the digit before it.
        Return True if the digits of <n> are in ascending order; equal neighbours are fine.
        """,
        """
        <letters> = str(<n>)
        return all(a <= b for a, b in zip(<letters>, <letters>[1:]))
        ---
        return list(str(<n>)) == sorted(str(<n>))
        """,
    ),
    template(
        "recurrence linear_sequence sequence_<p>_<q>",
        "n:natural -> int",
        """
        Return element <n> of the sequence that begins with <p>, <q>, and goes on with <r> times the last element plus the one before it. Counting starts at 0.
        A sequence starts with <p> and <q>; each further element is <r> times its predecessor plus the element before that. Return element <n>, counted from 0.
        """,
        """
        a, b = <p>, <q>
        for _ in range(<n>):
            a, b = b, <r> * b + a
        return a
        ---
        if <n> == 0:
            return <p>
        if <n> == 1:
            return <q>
        return <r> * <name>(<n> - 1) + <name>(<n> - 2)
        ---
        <result> = [<p>, <q>]
        while len(<result>) <= <n>:
            <result>.append(<r> * <result>[-1] + <result>[-2])
        return <result>[<n>]
        """,
        weight=3,
        p=[0, 1, 2, 3],
        q=[1, 2, 4, 5],
        r=[2, 3, 4],
    ),
    template(
        "fibonacci fibonacci_numbers first_fibonacci",
        "n:natural -> list[int]",
        """
        Return the first <n> Fibonacci numbers, beginning with <start_at.words>.
        List <n> Fibonacci numbers. The first two are <start_at.words>, each later one is the sum of the two before.
        """,
        """
        <result> = []
        a, b = <start_at.code>
        for _ in range(<n>):
            <result>.append(a)
            a, b = b, a + b
        return <result>
        """,
        start_at=FIBONACCI_STARTS,
    ),
    template(
        "arithmetic_progression evenly_spaced steps_of_<k>",
        "start:int n:natural -> list[int]",
        """
        Return <n> integers, the first of which is <start> and each further one <k> more.
        List <n> numbers that begin at <start> and grow by <k>.
        """,
        """
        return [<start> + <k> * <i> for <i> in range(<n>)]
        ---
        <result> = []
        for _ in range(<n>):
            <result>.append(<start>)
            <start> += <k>
        return <result>
        ---
        return list(range(<start>, <start> + <k> * <n>, <k>))
        """,
        k=range(2, 12),
    ),
    template(
        "geometric_sequence repeated_product powers_of_<k>",
        "n:natural -> list[int]",
        """
        Return the first <n> powers of <k>, beginning with 1.
        List 1, <k>, and so on: <n> numbers, each <k> times the one before.
        """,
        """
        return [<k>**<i> for <i> in range(<n>)]
        ---
        <result> = []
        <x> = 1
        for _ in range(<n>):
            <result>.append(<x>)
            <x> *= <k>
        return <result>
        """,
        k=[2, 3, 4, 5, 10],
    ),
    template(
        "collatz_steps steps_until_one hailstone_length",
        "n:positive -> int",
        """
        Return how many steps lead from <n> to 1, where an even number is halved and an odd one becomes three times itself plus 1.
        Halve <n> if it is even, otherwise triple it and add 1. Return the number of steps until 1 is reached.
        """,
        """
        <count> = 0
        while <n> != 1:
            if <n> % 2 == 0:
                <n> //= 2
            else:
                <n> = 3 * <n> + 1
            <count> += 1
        return <count>
        """,
    ),
    template(
        "triangular_number triangle_sum sum_until",
        "n:positive -> int",
        """
        Return 1 + 2 + ... + <n>.
        Add all integers from 1 up to and including <n>.
        """,
        """
        return <n> * (<n> + 1) // 2
        ---
        <total> = 0
        for <x> in range(1, <n> + 1):
            <total> += <x>
        return <total>
        ---
        return sum(range(<n> + 1))
        """,
    ),
]
