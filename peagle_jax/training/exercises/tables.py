"""Templates about matrices and intervals."""

from peagle_jax.training.exercises.choices import AGGREGATES, LENGTHS, NUMBER_CHANGES, NUMBER_TESTS
from peagle_jax.training.exercises.template import template

TEMPLATES = [
    template(
        "row_<agg.name> <agg.name>_of_rows <agg.name>_per_row",
        "matrix:matrix -> list[int]",
        """
        Return a list with the <agg.words> of each row of <matrix>.
        Compute the <agg.words> of every row in <matrix>.
        """,
        """
        return [<agg.code>(<row>) for <row> in <matrix>]
        ---
        <result> = []
        for <row> in <matrix>:
            <result>.append(<agg.code>(<row>))
        return <result>
        """,
        agg=AGGREGATES,
    ),
    template(
        "column_<agg.name> <agg.name>_of_columns <agg.name>_per_column",
        "matrix:matrix -> list[int]",
        """
        Return a list with the <agg.words> of each column of <matrix>.
        Compute the <agg.words> of every column in <matrix>.
        """,
        """
        return [<agg.code>(column) for column in zip(*<matrix>)]
        ---
        <result> = []
        for <j> in range(len(<matrix>[0])):
            <result>.append(<agg.code>([<row>[<j>] for <row> in <matrix>]))
        return <result>
        """,
        agg=AGGREGATES,
    ),
    template(
        "count_<test.name>_in_matrix grid_count_<test.name>",
        "matrix:matrix -> int",
        """
        Return how many elements of <matrix> are <test.are>.
        Count the <test.those> in all rows of <matrix>.
        """,
        """
        return sum(1 for <row> in <matrix> for <x> in <row> if <test.code>)
        ---
        <count> = 0
        for <row> in <matrix>:
            for <x> in <row>:
                if <test.code>:
                    <count> += 1
        return <count>
        """,
        weight=4,
        test=NUMBER_TESTS,
    ),
    template(
        "cells_with_<test.name> find_<test.name>_cells",
        "matrix:matrix -> list[tuple[int, int]]",
        """
        Return the places (row, column) of the <test.those> in <matrix>, row by row.
        List the row and column indices at which <matrix> holds <test.those>.
        """,
        """
        return [
            (<i>, <j>)
            for <i>, <row> in enumerate(<matrix>)
            for <j>, <x> in enumerate(<row>)
            if <test.code>
        ]
        ---
        <result> = []
        for <i>, <row> in enumerate(<matrix>):
            for <j>, <x> in enumerate(<row>):
                if <test.code>:
                    <result>.append((<i>, <j>))
        return <result>
        """,
        weight=3,
        test=NUMBER_TESTS,
    ),
    template(
        "matrix_of_<change.name> map_matrix_to_<change.name>",
        "matrix:matrix -> list[list[int]]",
        """
        Return a matrix with <change.of> the elements of <matrix>.
        Compute <change.of> all elements of <matrix>; the result has the same shape.
        """,
        """
        return [[<change.code> for <x> in <row>] for <row> in <matrix>]
        ---
        <result> = []
        for <row> in <matrix>:
            <result>.append([<change.code> for <x> in <row>])
        return <result>
        """,
        weight=3,
        change=NUMBER_CHANGES,
    ),
    template(
        "transpose flip_rows_and_columns transposed",
        "matrix:matrix -> list[list[int]]",
        """
        Return the transpose of <matrix>: its columns become rows.
        Swap the rows and the columns of <matrix>.
        """,
        """
        return [list(column) for column in zip(*<matrix>)]
        ---
        return [[<row>[<j>] for <row> in <matrix>] for <j> in range(len(<matrix>[0]))]
        ---
        <result> = [[] for _ in <matrix>[0]]
        for <row> in <matrix>:
            for <j>, <x> in enumerate(<row>):
                <result>[<j>].append(<x>)
        return <result>
        """,
    ),
    template(
        "diagonal_sum trace sum_diagonal",
        "matrix:square -> int",
        """
        Return the sum of the elements on the main diagonal of <matrix>.
        Add up the diagonal of <matrix>, from the top left to the bottom right.
        """,
        """
        return sum(<matrix>[<i>][<i>] for <i> in range(len(<matrix>)))
        ---
        <total> = 0
        for <i>, <row> in enumerate(<matrix>):
            <total> += <row>[<i>]
        return <total>
        """,
    ),
    template(
        "is_symmetric symmetric_matrix equals_transpose",
        "matrix:square -> bool",
        """
        Return True if <matrix> equals its transpose.
        Return True if <matrix> is symmetric about its main diagonal.
        """,
        """
        <size> = len(<matrix>)
        return all(<matrix>[<i>][<j>] == <matrix>[<j>][<i>] for <i> in range(<size>) for <j> in range(<i>))
        ---
        return [list(column) for column in zip(*<matrix>)] == <matrix>
        """,
    ),
    template(
        "identity_matrix unit_matrix diagonal_matrix_of_<k>",
        "size:size -> list[list[int]]",
        """
        Return a square matrix of <size> rows with <k> on the main diagonal and 0 elsewhere.
        Make a <size> by <size> matrix whose diagonal elements are <k>; all others are 0.
        """,
        """
        return [[<k> if <i> == <j> else 0 for <j> in range(<size>)] for <i> in range(<size>)]
        ---
        <matrix> = [[0] * <size> for _ in range(<size>)]
        for <i> in range(<size>):
            <matrix>[<i>][<i>] = <k>
        return <matrix>
        """,
        k=[1, 2, 3, 5, 7, 9],
    ),
    template(
        "add_to_all raise_elements shift_matrix",
        "matrix:square size:limit -> list[list[int]]",
        """
        Return <matrix> with <size> added to each of its elements.
        Add <size> to every element of <matrix> and return the new matrix.
        """,
        """
        return [[<x> + <size> for <x> in <row>] for <row> in <matrix>]
        ---
        <result> = []
        for <row> in <matrix>:
            <result>.append([<x> + <size> for <x> in <row>])
        return <result>
        """,
    ),
    template(
        "flatten_rows all_elements join_rows",
        "matrix:matrix -> list[int]",
        """
        Return all elements of <matrix> in one list, row by row.
        Put the rows of <matrix> one after another into a single list.
        """,
        """
        return [<x> for <row> in <matrix> for <x> in <row>]
        ---
        <result> = []
        for <row> in <matrix>:
            <result>.extend(<row>)
        return <result>
        ---
        from itertools import chain
        ===
        return list(chain.from_iterable(<matrix>))
        """,
    ),
    template(
        "multiplication_table products_up_to times_table",
        "size:size -> list[list[int]]",
        """
        Return the table of the products of 1 to <size>, as a list of <size> rows.
        Make a multiplication table with <size> rows and <size> columns.
        """,
        """
        return [[<i> * <j> for <j> in range(1, <size> + 1)] for <i> in range(1, <size> + 1)]
        ---
        <matrix> = []
        for <i> in range(1, <size> + 1):
            <matrix>.append([<i> * <j> for <j> in range(1, <size> + 1)])
        return <matrix>
        """,
    ),
    template(
        "turn_clockwise rotate_matrix quarter_turn",
        "matrix:matrix -> list[list[int]]",
        """
        Return <matrix> turned clockwise by 90 degrees.
        Rotate <matrix> by a quarter turn to the right.
        """,
        """
        return [list(<row>) for <row> in zip(*<matrix>[::-1])]
        ---
        return [[<row>[<j>] for <row> in reversed(<matrix>)] for <j> in range(len(<matrix>[0]))]
        """,
    ),
    template(
        "overlaps intervals_overlap have_common_part",
        "left:interval right:interval -> bool",
        """
        Return True if the intervals <left> and <right> have a point in common; both ends belong to them.
        Return True if <left> and <right> overlap or touch. Each is a pair (start, end).
        """,
        """
        return <left>[0] <= <right>[1] and <right>[0] <= <left>[1]
        ---
        return max(<left>[0], <right>[0]) <= min(<left>[1], <right>[1])
        """,
    ),
    template(
        "overlap_length common_length shared_length",
        "left:interval right:interval -> int",
        """
        Return how long the common part of <left> and <right> is, or 0 without any.
        Compute the length that the intervals <left> and <right> share.
        """,
        """
        return max(0, min(<left>[1], <right>[1]) - max(<left>[0], <right>[0]))
        ---
        <low> = max(<left>[0], <right>[0])
        <high> = min(<left>[1], <right>[1])
        return <high> - <low> if <high> > <low> else 0
        """,
    ),
    template(
        "merge_intervals join_overlapping unite_ranges",
        "intervals:intervals -> list[tuple[int, int]]",
        """
        Return <intervals> sorted, with those that overlap or touch merged into one.
        Merge all overlapping intervals of <intervals>; the result is in ascending order.
        """,
        """
        <result> = []
        for <start>, <end> in sorted(<intervals>):
            if <result> and <start> <= <result>[-1][1]:
                <result>[-1] = (<result>[-1][0], max(<end>, <result>[-1][1]))
            else:
                <result>.append((<start>, <end>))
        return <result>
        """,
    ),
    template(
        "total_<what.name> sum_of_<what.name>",
        "intervals:intervals -> int",
        """
        Return the <what.words> of <intervals>; overlaps count each time.
        Compute the <what.words> of <intervals>, without regard to overlaps.
        """,
        """
        return <what.code>(<end> - <start> for <start>, <end> in <intervals>)
        """,
        what=LENGTHS,
    ),
    template(
        "intervals_containing ranges_with_point covering",
        "intervals:intervals x:natural -> list[tuple[int, int]]",
        """
        Return those of <intervals> that contain <x>, ends included.
        List the intervals (start, end) of <intervals> with start <= <x> <= end.
        """,
        """
        return [(<start>, <end>) for <start>, <end> in <intervals> if <start> <= <x> <= <end>]
        ---
        <result> = []
        for <start>, <end> in <intervals>:
            if <start> <= <x> <= <end>:
                <result>.append((<start>, <end>))
        return <result>
        """,
    ),
]
