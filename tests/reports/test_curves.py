"""Curves for terminals: where the dots lie, in braille and in letters."""

import pytest

from superpod.reports.curves import LABEL_WIDTH, Curve, draw_curves, format_axis_value


def text(curves, **how):
    return [line.plain for line in draw_curves(curves, **how)]


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right():
    curve = Curve([1, 2, 3, 4], [0.0, 1.0, 2.0, 3.0])
    *rows, ends = text([curve], width=LABEL_WIDTH + 2 + 10, height=4, braille=False)
    marked = [row[LABEL_WIDTH + 2 :].rstrip() for row in rows]
    assert [row.rfind("*") for row in marked] == sorted((row.rfind("*") for row in marked), reverse=True)
    assert marked[0].endswith("*")
    assert marked[-1].startswith("*")
    assert rows[0].split("|")[0].strip() == "3"
    assert rows[-1].split("|")[0].strip() == "0"
    assert ends.split() == ["1", "4"]


def test_braille_has_eight_dots_a_letter():
    full = Curve([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 0, 1, 2, 3])
    rows = text([full], width=LABEL_WIDTH + 2 + 8, height=1, braille=True)
    letters = [letter for letter in rows[0] if letter >= "\u2800"]
    assert all("\u2800" < letter <= "\u28ff" for letter in letters)
    flat = text([Curve([0, 1], [5, 5])], width=LABEL_WIDTH + 2 + 8, height=1, braille=True)[0]
    assert flat.endswith("⠉" * 8)


def test_several_curves_have_letters_of_their_own_and_dots_are_marks():
    curves = [Curve([0, 9], [0, 0]), Curve([0, 9], [4, 4], color=1), Curve([9], [2], dots=True)]
    rows = text(curves, width=LABEL_WIDTH + 2 + 10, height=5, braille=False)
    assert "+" in rows[0]
    assert "*" in rows[4]
    assert rows[2].endswith("o")


def test_a_long_noisy_curve_is_drawn_by_medians():
    noisy = Curve([*range(10_000)], [float(i % 100) for i in range(10_000)])
    rows = text([noisy], width=60, height=5, braille=False)
    assert sum("*" in row for row in rows[:-1]) == 1


def test_nothing_is_drawn_of_nothing_and_one_point_is_a_point():
    assert text([Curve([], [])], width=40, height=4, braille=True) == []
    rows = text([Curve([3], [1.5])], width=40, height=4, braille=False)
    assert sum(row.count("*") for row in rows) == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [(3.0, "3"), (150_000, "150,000"), (0.00012, "1.20e-04"), (2.34567, "2.346"), (-1e9, "-1.00e+09")],
)
def test_numbers_fit_beside_the_curve(value, shown):
    assert format_axis_value(value) == shown
    assert len(shown) <= LABEL_WIDTH
