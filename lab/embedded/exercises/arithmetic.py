"""Templates about integers and simple formulas."""

from lab.embedded.exercises.choices import DIVISORS
from lab.embedded.exercises.template import template

TEMPLATES = [
    template(
        "prime_check check_prime is_prime_number",
        "n:positive -> bool",
        """
        Return True if <n> is a prime number.
        Return True if <n> is greater than 1 and has no divisors but 1 and itself.
        """,
        """
        if <n> < 2:
            return False
        for <i> in range(2, int(<n>**0.5) + 1):
            if <n> % <i> == 0:
                return False
        return True
        ---
        return <n> > 1 and all(<n> % <i> for <i> in range(2, int(<n>**0.5) + 1))
        ---
        if <n> < 2:
            return False
        <i> = 2
        while <i> * <i> <= <n>:
            if <n> % <i> == 0:
                return False
            <i> += 1
        return True
        """,
        weight=3,
    ),
    template(
        "primes_below list_primes primes_until",
        "n:positive -> list[int]",
        """
        Return the prime numbers below <n> in ascending order.
        List all primes that are smaller than <n>.
        """,
        """
        <result> = []
        for <x> in range(2, <n>):
            if all(<x> % p for p in <result>):
                <result>.append(<x>)
        return <result>
        ---
        sieve = [True] * <n>
        <result> = []
        for <x> in range(2, <n>):
            if sieve[<x>]:
                <result>.append(<x>)
                for multiple in range(<x> * <x>, <n>, <x>):
                    sieve[multiple] = False
        return <result>
        ---
        def has_divisor(<x>):
            return any(<x> % d == 0 for d in range(2, int(<x>**0.5) + 1))
        ===
        return [<x> for <x> in range(2, <n>) if not has_divisor(<x>)]
        """,
    ),
    template(
        "prime_factors factors_of decompose prime_factorization",
        "n:positive -> list[int]",
        """
        Return the prime factors of <n> in ascending order, each as often as it divides <n>.
        Decompose <n> into prime numbers; their product is <n>.
        """,
        """
        <result> = []
        p = 2
        while p * p <= <n>:
            while <n> % p == 0:
                <result>.append(p)
                <n> //= p
            p += 1
        if <n> > 1:
            <result>.append(<n>)
        return <result>
        ---
        <result> = []
        p = 2
        while <n> > 1:
            if <n> % p == 0:
                <result>.append(p)
                <n> //= p
            else:
                p += 1
        return <result>
        """,
        notes="The number 1 has none.",
    ),
    template(
        "divisors all_divisors divisors_of",
        "n:positive -> list[int]",
        """
        Return all divisors of <n><only.words>, in ascending order.
        List the positive integers<only.words> by which <n> can be divided without remainder.
        """,
        """
        return [<x> for <x> in range(1, <n> + 1) if <n> % <x> == 0<only.code>]
        ---
        <result> = []
        for <x> in range(1, <n> + 1):
            if <n> % <x> == 0<only.code>:
                <result>.append(<x>)
        return <result>
        """,
        only=DIVISORS,
    ),
    template(
        "divisor_sum sum_of_divisors add_divisors",
        "n:positive -> int",
        """
        Return the sum of the divisors of <n><only.words>.
        Add up all divisors of <n><only.words>.
        """,
        """
        return sum(<x> for <x> in range(1, <n> + 1) if <n> % <x> == 0<only.code>)
        ---
        <total> = 0
        for <x> in range(1, <n> + 1):
            if <n> % <x> == 0<only.code>:
                <total> += <x>
        return <total>
        """,
        only=DIVISORS,
    ),
    template(
        "gcd common_divisor highest_common_factor",
        "a:positive b:positive -> int",
        """
        Return the largest integer that divides both <a> and <b>.
        Compute the highest common factor of <a> and <b>.
        """,
        """
        while <b>:
            <a>, <b> = <b>, <a> % <b>
        return <a>
        ---
        import math
        ===
        return math.gcd(<a>, <b>)
        ---
        if <b> == 0:
            return <a>
        return <name>(<b>, <a> % <b>)
        ---
        for <x> in range(min(<a>, <b>), 0, -1):
            if <a> % <x> == 0 and <b> % <x> == 0:
                return <x>
        """,
        notes="Euclid described a method for it.",
    ),
    template(
        "lcm least_common_multiple smallest_common_multiple",
        "a:positive b:positive -> int",
        """
        Return the smallest positive integer that is a multiple of both <a> and <b>.
        Compute the least common multiple of <a> and <b>.
        """,
        """
        import math
        ===
        return <a> * <b> // math.gcd(<a>, <b>)
        ---
        <x> = <a>
        while <x> % <b> != 0:
            <x> += <a>
        return <x>
        """,
    ),
    template(
        "are_coprime no_common_factor relatively_prime",
        "a:positive b:positive -> bool",
        """
        Return True if <a> and <b> have no common divisor but 1.
        Return True if <a> and <b> are coprime.
        """,
        """
        import math
        ===
        return math.gcd(<a>, <b>) == 1
        ---
        return not any(<a> % <x> == 0 and <b> % <x> == 0 for <x> in range(2, min(<a>, <b>) + 1))
        """,
    ),
    template(
        "clamp limit_to_range clip keep_in_range",
        "x:int low:natural high:length_above -> int",
        """
        Return <x> if it lies between <low> and <high>, otherwise the nearer one of the two.
        Limit <x> to the range from <low> to <high>.
        """,
        """
        return max(<low>, min(<x>, <high>))
        ---
        if <x> < <low>:
            return <low>
        if <x> > <high>:
            return <high>
        return <x>
        """,
    ),
    template(
        "integer_power raise_to power_of",
        "base:base n:natural -> int",
        """
        Return <base> to the power of <n>, by repeated multiplication.
        Multiply <base> by itself until it is the factor <n> times.
        """,
        """
        <result> = 1
        for _ in range(<n>):
            <result> *= <base>
        return <result>
        ---
        if <n> == 0:
            return 1
        return <base> * <name>(<base>, <n> - 1)
        """,
    ),
    template(
        "is_power_of_<k> power_of_<k>_check",
        "n:positive -> bool",
        """
        Return True if <n> is a power of <k>.
        Return True if <n> is 1 or a product of <k> with itself.
        """,
        """
        while <n> % <k> == 0:
            <n> //= <k>
        return <n> == 1
        ---
        <x> = 1
        while <x> < <n>:
            <x> *= <k>
        return <x> == <n>
        """,
        k=[2, 3, 4, 5, 6, 7, 10],
        notes="The number 1 counts as a power.",
    ),
    template(
        "is_square_number perfect_square_check has_integer_root",
        "n:positive -> bool",
        """
        Return True if <n> is the square of an integer.
        Return True if the square root of <n> is an integer.
        """,
        """
        import math
        ===
        return math.isqrt(<n>) ** 2 == <n>
        ---
        <x> = 0
        while <x> * <x> < <n>:
            <x> += 1
        return <x> * <x> == <n>
        """,
    ),
    template(
        "times_dividing multiplicity exponent_of",
        "n:large -> int",
        """
        Return how often <n> can be divided by <k> without remainder.
        Count the factors <k> of <n>.
        """,
        """
        <count> = 0
        while <n> % <k> == 0:
            <n> //= <k>
            <count> += 1
        return <count>
        """,
        k=[2, 3, 4, 5, 6, 10],
    ),
    template(
        "halving_steps steps_to_one count_halvings",
        "n:positive -> int",
        """
        Return how many times <n> must be divided by <k>, rounding down, until it is 0.
        Divide <n> by <k> and round down until nothing is left. Return the number of steps.
        """,
        """
        <count> = 0
        while <n> > 0:
            <n> //= <k>
            <count> += 1
        return <count>
        ---
        return 0 if <n> == 0 else 1 + <name>(<n> // <k>)
        """,
        k=[2, 3, 4, 5, 10],
    ),
    template(
        "round_to_multiple nearest_multiple round_to_<k>",
        "n:positive -> int",
        """
        Return the smallest multiple of <k> that is not less than <n>.
        Round <n> up to a multiple of <k>.
        """,
        """
        return (<n> + <k> - 1) // <k> * <k>
        ---
        while <n> % <k> != 0:
            <n> += 1
        return <n>
        ---
        import math
        ===
        return math.ceil(<n> / <k>) * <k>
        """,
        k=[2, 3, 4, 5, 8, 10, 12, 50],
    ),
]
