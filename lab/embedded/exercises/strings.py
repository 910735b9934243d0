"""Templates about strings, words and lines."""

from lab.embedded.exercises.template import template

TEMPLATES = [
    template(
        "reverse_words words_backwards flip_word_order",
        "text:text -> str",
        """
        Return <text> with its words in reverse order.
        Reverse the order of the words in <text>; the words stay as they are.
        """,
        """
        return " ".join(reversed(<text>.split()))
        ---
        return " ".join(<text>.split()[::-1])
        ---
        <words> = <text>.split()
        <words>.reverse()
        return " ".join(<words>)
        """,
    ),
    template(
        "reverse_each_word mirror_words backwards_words",
        "text:text -> str",
        """
        Return <text> with the letters of each word reversed, the words in their order.
        Turn every word of <text> around without moving it.
        """,
        """
        return " ".join(<w>[::-1] for <w> in <text>.split())
        ---
        <result> = []
        for <w> in <text>.split():
            <result>.append(<w>[::-1])
        return " ".join(<result>)
        """,
    ),
    template(
        "initials acronym first_letters abbreviation",
        "text:text -> str",
        """
        Return the upper-case initials of the words in <text>.
        Make an acronym of <text> from the first letters of its words, in upper case.
        """,
        """
        return "".join(<w>[0].upper() for <w> in <text>.split())
        ---
        <result> = ""
        for <w> in <text>.split():
            <result> += <w>[0]
        return <result>.upper()
        """,
    ),
    template(
        "title_words capitalize_all title_case",
        "text:text -> str",
        """
        Return <text> with a capital letter at the beginning of each word.
        Capitalize every word of <text>.
        """,
        """
        return " ".join(<w>.capitalize() for <w> in <text>.split())
        ---
        <words> = []
        for <w> in <text>.split():
            <words>.append(<w>[0].upper() + <w>[1:].lower())
        return " ".join(<words>)
        """,
        notes="Other letters become lower-case.",
    ),
    template(
        "longest_word find_longest_word widest_word",
        "text:text -> str",
        """
        Return the longest word of <text>, the first one if there are several.
        Find the word of <text> that has the most characters. In case of a tie the first one counts.
        """,
        """
        return max(<text>.split(), key=len)
        ---
        <best> = ""
        for <w> in <text>.split():
            if len(<w>) > len(<best>):
                <best> = <w>
        return <best>
        """,
    ),
    template(
        "mean_word_length average_word_length",
        "text:text -> float",
        """
        Return the mean length of the words in <text>, rounded to two decimals.
        Compute how long the words of <text> are on average, to two decimals.
        """,
        """
        <words> = <text>.split()
        return round(sum(len(<w>) for <w> in <words>) / len(<words>), 2)
        ---
        <words> = <text>.split()
        <total> = 0
        for <w> in <words>:
            <total> += len(<w>)
        return round(<total> / len(<words>), 2)
        """,
    ),
    template(
        "truncate shorten cut_text abbreviate",
        "text:text limit:limit -> str",
        """
        Return at most the first <limit> characters of <text>, and "<end_mark>" if there are more.
        Shorten <text> to <limit> characters and add "<end_mark>" if something was cut off.
        """,
        """
        if len(<text>) <= <limit>:
            return <text>
        return <text>[:<limit>] + "<end_mark>"
        ---
        return <text> if len(<text>) <= <limit> else <text>[:<limit>] + "<end_mark>"
        """,
        end_mark=["...", "~", " [...]", "--"],
    ),
    template(
        "pad_right fill_up extend_to",
        "word:word size:limit -> str",
        """
        Return <word> followed by as many "<fill>" as make it <size> characters long.
        Fill <word> up with "<fill>" on the right until it has <size> characters.
        """,
        """
        return <word>.ljust(<size>, "<fill>")
        ---
        return <word> + "<fill>" * (<size> - len(<word>))
        ---
        while len(<word>) < <size>:
            <word> += "<fill>"
        return <word>
        """,
        fill=["*", ".", "-", "_", "#"],
    ),
    template(
        "in_chunks split_every cut_into_pieces slices_of",
        "text:text size:size -> list[str]",
        """
        Return the pieces of <size> characters that <text> consists of; the last one may be shorter.
        Cut <text> into pieces of <size> characters.
        """,
        """
        return [<text>[<i> : <i> + <size>] for <i> in range(0, len(<text>), <size>)]
        ---
        <parts> = []
        while <text>:
            <parts>.append(<text>[:<size>])
            <text> = <text>[<size>:]
        return <parts>
        """,
        notes="All pieces but the last have the same length.",
    ),
    template(
        "all_substrings windows substrings_of_length",
        "word:word size:size -> list[str]",
        """
        Return all substrings of <word> with <size> characters, from left to right.
        List every piece of <size> neighbouring letters in <word>.
        """,
        """
        return [<word>[<i> : <i> + <size>] for <i> in range(len(<word>) - <size> + 1)]
        ---
        <result> = []
        for <i> in range(len(<word>) - <size> + 1):
            <result>.append(<word>[<i> : <i> + <size>])
        return <result>
        """,
    ),
    template(
        "to_snake_case snake_case underscore_name",
        "label:mixed -> str",
        """
        Return <label> in lower case, with "<glue>" in place of spaces and hyphens.
        Make an identifier of <label>: lower case, and "<glue>" for each space or hyphen.
        """,
        """
        return <label>.lower().replace(" ", "<glue>").replace("-", "<glue>")
        ---
        <result> = ""
        for <char> in <label>.lower():
            <result> += "<glue>" if <char> in " -" else <char>
        return <result>
        """,
        glue=["_", "__", ".", "/"],
    ),
    template(
        "to_camel_case camel_case camelize",
        "text:text -> str",
        """
        Return the words of <text> together; each but the first begins with a capital letter.
        Join the words of <text> in camel case: the first lower case, the others capitalized.
        """,
        """
        <first>, *<rest> = <text>.split()
        return <first>.lower() + "".join(<w>.capitalize() for <w> in <rest>)
        ---
        <words> = <text>.split()
        <result> = <words>[0].lower()
        for <w> in <words>[1:]:
            <result> += <w>.capitalize()
        return <result>
        """,
    ),
    template(
        "are_anagrams same_letters is_rearranged",
        "left:word right:word -> bool",
        """
        Return True if <left> and <right> have the same letters, equally often.
        Return True if the letters of <left> can be rearranged to <right>.
        """,
        """
        return sorted(<left>) == sorted(<right>)
        ---
        from collections import Counter
        ===
        return Counter(<left>) == Counter(<right>)
        ---
        if len(<left>) != len(<right>):
            return False
        return all(<left>.count(<char>) == <right>.count(<char>) for <char> in <left>)
        """,
    ),
    template(
        "reads_same_backwards mirrored_ignoring_case is_symmetric_text",
        "text:text -> bool",
        """
        Return True if the letters of <text>, without case, read the same in both directions.
        Ignore case and everything but letters. Return True if <text> is then the same backwards.
        """,
        """
        <letters> = [<char>.lower() for <char> in <text> if <char>.isalpha()]
        return <letters> == <letters>[::-1]
        ---
        <letters> = [<char> for <char> in <text>.lower() if <char>.isalpha()]
        <low>, <high> = 0, len(<letters>) - 1
        while <low> < <high>:
            if <letters>[<low>] != <letters>[<high>]:
                return False
            <low> += 1
            <high> -= 1
        return True
        """,
    ),
    template(
        "interleave zip_strings alternate_letters",
        "left:word right:word -> str",
        """
        Return the letters of <left> and <right> in turn; the rest of the longer one follows.
        Merge <left> and <right> by taking a letter from each in turn, and append what is left over.
        """,
        """
        <size> = min(len(<left>), len(<right>))
        <result> = "".join(a + b for a, b in zip(<left>, <right>))
        return <result> + <left>[<size>:] + <right>[<size>:]
        ---
        <result> = ""
        for <i> in range(max(len(<left>), len(<right>))):
            <result> += <left>[<i> : <i> + 1] + <right>[<i> : <i> + 1]
        return <result>
        """,
    ),
    template(
        "word_counts count_each_word word_frequencies",
        "text:text -> dict[str, int]",
        """
        Return a dictionary from each word of <text>, in lower case, to its number of occurrences.
        Count the words of <text> without regard to case.
        """,
        """
        <counts> = {}
        for <w> in <text>.lower().split():
            <counts>[<w>] = <counts>.get(<w>, 0) + 1
        return <counts>
        ---
        from collections import Counter
        ===
        return dict(Counter(<text>.lower().split()))
        """,
    ),
    template(
        "number_lines with_line_numbers numbered",
        "words:words -> list[str]",
        """
        Return the strings of <words>, each with its position from 1 and "<glue>" in front of it.
        Number <words>: put 1, 2, and so on, followed by "<glue>", before the strings.
        """,
        """
        return [f"{<i>}<glue>{<w>}" for <i>, <w> in enumerate(<words>, start=1)]
        ---
        <result> = []
        for <i>, <w> in enumerate(<words>):
            <result>.append(str(<i> + 1) + "<glue>" + <w>)
        return <result>
        """,
        glue=[": ", ". ", ") ", " - ", " "],
    ),
    template(
        "is_hidden_in is_subsequence can_be_left_over",
        "left:pair right:word -> bool",
        """
        Return True if the characters of <left> occur in <right> in the same order.
        Return True if <left> remains after deleting some characters of <right>.
        """,
        """
        <i> = 0
        for <char> in <right>:
            if <i> < len(<left>) and <left>[<i>] == <char>:
                <i> += 1
        return <i> == len(<left>)
        ---
        <letters> = iter(<right>)
        return all(<char> in <letters> for <char> in <left>)
        """,
    ),
]
