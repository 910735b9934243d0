"""Templates about formats, units, parsing and validation."""

from peagle_jax.training.exercises.choices import PERCENT, SEPARATORS, THREE_LABELS
from peagle_jax.training.exercises.template import template

TEMPLATES = [
    template(
        "join_numbers numbers_to_text write_numbers",
        "numbers:ints -> str",
        """
        Return the elements of <numbers> as one string, separated by <sep.name>.
        Join <numbers> to a string with <sep.name> between the elements.
        """,
        """
        return <sep.code>.join(str(<x>) for <x> in <numbers>)
        ---
        return <sep.code>.join(map(str, <numbers>))
        """,
        sep=SEPARATORS,
    ),
    template(
        "format_time clock_format to_clock seconds_to_clock",
        "seconds:seconds -> str",
        """
        Return <seconds> in the form "H:MM:SS".
        Format a number of <seconds> as hours, minutes and seconds; the latter two have two digits.
        """,
        """
        minutes, rest = divmod(<seconds>, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{rest:02d}"
        ---
        hours = <seconds> // 3600
        minutes = <seconds> % 3600 // 60
        return f"{hours}:{minutes:02}:{<seconds> % 60:02}"
        """,
    ),
    template(
        "split_seconds hours_minutes_seconds duration_parts",
        "seconds:seconds -> tuple[int, int, int]",
        """
        Return the hours, minutes and seconds that <seconds> consist of.
        Split <seconds> into a tuple of hours, minutes below 60, and seconds below 60.
        """,
        """
        minutes, rest = divmod(<seconds>, 60)
        return minutes // 60, minutes % 60, rest
        ---
        hours = <seconds> // 3600
        rest = <seconds> - 3600 * hours
        return hours, rest // 60, rest % 60
        """,
    ),
    template(
        "days_of_year year_length days_in_year",
        "year:year -> int",
        """
        Return the number of days of <year> in the Gregorian calendar.
        Return how many days <year> has: 366 in a leap year, otherwise 365.
        """,
        """
        if <year> % 4 == 0 and (<year> % 100 != 0 or <year> % 400 == 0):
            return 366
        return 365
        ---
        if <year> % 400 == 0:
            return 366
        if <year> % 100 == 0:
            return 365
        return 366 if <year> % 4 == 0 else 365
        """,
    ),
    template(
        "with_thousands group_digits format_large",
        "n:large -> str",
        """
        Return <n> as a string with "<mark>" between groups of three digits.
        Format <n> with "<mark>" after every three digits, counted from the right.
        """,
        """
        <rest> = str(<n>)
        <parts> = []
        while len(<rest>) > 3:
            <parts>.insert(0, <rest>[-3:])
            <rest> = <rest>[:-3]
        return "<mark>".join([<rest>, *<parts>])
        ---
        return f"{<n>:,}".replace(",", "<mark>")
        """,
        mark=["_", ".", "'", " "],
    ),
    template(
        "ordinal with_suffix place_name",
        "n:positive -> str",
        """
        Return <n> with the suffix of an English ordinal, such as 1st or 12th.
        Write <n> as an ordinal number: th after 11, 12 and 13, otherwise st, nd or rd after 1, 2 and 3.
        """,
        """
        if <n> % 100 in (11, 12, 13):
            return f"{<n>}th"
        return str(<n>) + {1: "st", 2: "nd", 3: "rd"}.get(<n> % 10, "th")
        ---
        if 10 < <n> % 100 < 14:
            ending = "th"
        elif <n> % 10 == 1:
            ending = "st"
        elif <n> % 10 == 2:
            ending = "nd"
        elif <n> % 10 == 3:
            ending = "rd"
        else:
            ending = "th"
        return f"{<n>}{ending}"
        """,
    ),
    template(
        "plural_phrase count_phrase how_many_<thing>s",
        "n:natural -> str",
        """
        Return a phrase for <n> <thing>s, such as "1 <thing>" or "2 <thing>s".
        Write <n> and the word "<thing>", in the plural unless <n> is 1.
        """,
        """
        return f"{<n>} <thing>" if <n> == 1 else f"{<n>} <thing>s"
        ---
        if <n> == 1:
            return "1 <thing>"
        return f"{<n>} <thing>s"
        """,
        thing=["file", "day", "point", "error", "page", "user", "line", "minute", "car", "tree"],
    ),
    template(
        "format_pairs query_string show_entries",
        "scores:counts -> str",
        """
        Return the entries of <scores> in the form key<mark>value, separated by <sep.name>.
        Write each entry of <scores> as key<mark>value and join them with <sep.name>.
        """,
        """
        return <sep.code>.join(f"{<key>}<mark>{<value>}" for <key>, <value> in <scores>.items())
        ---
        <parts> = []
        for <key>, <value> in <scores>.items():
            <parts>.append(str(<key>) + "<mark>" + str(<value>))
        return <sep.code>.join(<parts>)
        """,
        mark=["=", ":", "->"],
        sep=SEPARATORS,
    ),
    template(
        "digits_in_text number_in_text first_number",
        "text:mixed -> int | None",
        """
        Return the first integer that is written in <text>, or None if it has no digits.
        Find the first block of digits in <text> and return it as an integer. Without digits, return None.
        """,
        """
        import re
        ===
        match = re.search(r"[0-9]+", <text>)
        return int(match.group()) if match else None
        ---
        <digits> = ""
        for <char> in <text>:
            if <char>.isdigit():
                <digits> += <char>
            elif <digits>:
                break
        return int(<digits>) if <digits> else None
        """,
    ),
    template(
        "is_valid_<label> valid_<label> check_<label>",
        "text:mixed -> bool",
        """
        Return True if <text> is a valid <label>: at least <k> characters, a digit, and an upper-case letter.
        Return True if <text> has <k> or more characters, among them a digit and a capital letter.
        """,
        """
        if len(<text>) < <k>:
            return False
        has_digit = any(<char>.isdigit() for <char> in <text>)
        has_capital = any(<char>.isupper() for <char> in <text>)
        return has_digit and has_capital
        ---
        return (
            len(<text>) >= <k>
            and any(<char>.isdigit() for <char> in <text>)
            and any(<char>.isupper() for <char> in <text>)
        )
        """,
        label=["password", "code", "key", "login"],
        k=[4, 6, 8, 10, 12],
    ),
    template(
        "is_identifier_like valid_name is_plain_name",
        "text:mixed -> bool",
        """
        Return True if <text> begins with a letter and has only letters, digits and "<mark>".
        Return True if the first character of <text> is a letter and each other one a letter, a digit or "<mark>".
        """,
        """
        if not <text> or not <text>[0].isalpha():
            return False
        return all(<char>.isalnum() or <char> == "<mark>" for <char> in <text>)
        ---
        if not <text>[:1].isalpha():
            return False
        for <char> in <text>:
            if not (<char>.isalnum() or <char> == "<mark>"):
                return False
        return True
        """,
        mark=["_", "-", "."],
    ),
    template(
        "checksum_ok valid_checksum check_sum_<k>",
        "digits:digits -> bool",
        """
        Return True if the sum of the digits in <digits> is divisible by <k>.
        Return True if <digits> passes the check: its digits add up to a multiple of <k>.
        """,
        """
        return sum(int(<char>) for <char> in <digits>) % <k> == 0
        ---
        <total> = 0
        for <char> in <digits>:
            <total> += int(<char>)
        return <total> % <k> == 0
        """,
        k=range(2, 12),
    ),
    template(
        "mask_text hide_all_but_last masked",
        "digits:digits -> str",
        """
        Return <digits> with all but the last <k> characters replaced by "<mark>".
        Hide <digits>: only its last <k> characters remain readable, the others become "<mark>".
        """,
        """
        <size> = len(<digits>) - <k>
        return "<mark>" * <size> + <digits>[-<k>:]
        ---
        <result> = ""
        for <i>, <char> in enumerate(<digits>):
            <result> += "<mark>" if <i> < len(<digits>) - <k> else <char>
        return <result>
        """,
        mark=["*", "#", "x", "."],
        k=[1, 2, 3],
    ),
    template(
        "safe_divide ratio_or_<default_> divide_or_default",
        "a:int b:natural -> float",
        """
        Return <a> divided by <b>, rounded to <k> decimals, or <default_>.0 if <b> is 0.
        Divide <a> by <b> and round to <k> decimals. A division by zero gives <default_>.0.
        """,
        """
        if <b> == 0:
            return <default_>.0
        return round(<a> / <b>, <k>)
        ---
        try:
            return round(<a> / <b>, <k>)
        except ZeroDivisionError:
            return <default_>.0
        """,
        default_=[0, 1],
        k=[1, 2, 3],
    ),
    template(
        "checked_<label> require_<label> validate_<label>",
        "n:positive -> int",
        """
        Return <n> unless it is less than <low>; then raise a ValueError.
        Check the <label> <n> and return it. Raise a ValueError if it is below <low>.
        """,
        """
        if <n> < <low>:
            raise ValueError(f"<label> must be at least <low>, not {<n>}")
        return <n>
        """,
        label=["size", "age", "count", "width", "port", "length"],
        low=[0, 1],
    ),
    template(
        "<change.words>_price price_<change.words>_by <change.words>_by_percentage",
        "price:price percent:percent -> float",
        """
        Return <price> <change.words> by <percent> percent, rounded to two decimals.
        Compute what remains of <price> when it is <change.words> by <percent> per cent, to two decimals.
        """,
        """
        return round(<price> * (100 <change.code> <percent>) / 100, 2)
        ---
        share = 100 <change.code> <percent>
        return round(<price> * share / 100, 2)
        """,
        change=PERCENT,
    ),
    template(
        "celsius_to_fahrenheit to_fahrenheit",
        "degrees:float -> float",
        """
        Return the temperature <degrees>, given in degrees Celsius, in degrees Fahrenheit, to one decimal.
        Convert <degrees> from Celsius to Fahrenheit, rounded to one decimal.
        """,
        """
        return round(<degrees> * 9 / 5 + 32, 1)
        ---
        <result> = <degrees> * 9 / 5 + 32
        return round(<result>, 1)
        """,
    ),
    template(
        "classify_number sign_name describe_<low>_<high>",
        "n:int -> str",
        """
        Return "<words.a>" if <n> is below <low>, "<words.b>" from <low> to <high>, and "<words.c>" above.
        Classify <n>: "<words.a>" below <low>, "<words.c>" above <high>, otherwise "<words.b>".
        """,
        """
        if <n> < <low>:
            return "<words.a>"
        if <n> <= <high>:
            return "<words.b>"
        return "<words.c>"
        ---
        if <n> < <low>:
            return "<words.a>"
        elif <n> > <high>:
            return "<words.c>"
        else:
            return "<words.b>"
        """,
        weight=3,
        low=[0, 5, 10, 12, 18],
        high=[20, 30, 50, 64, 99],
        words=THREE_LABELS,
    ),
]
