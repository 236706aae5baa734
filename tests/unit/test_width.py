import pytest

from backend.engines.openvino import width
from backend.engines.openvino.width import MOST_ADDED, PassWidth, price_of_change


def widths(price, *rows):
    made = PassWidth(price)
    return [made.of(count) for count in rows]


def test_a_narrower_pass_is_as_wide_as_the_one_before_until_its_rows_come_to_a_change():
    assert widths(5, 9, 7, 7, 7) == [9, 9, 9, 7]
    assert widths(5, 9, 3, 3) == [9, 3, 3]
    assert widths(5, 4, 9, 12) == [4, 9, 12]


def test_a_pass_as_wide_as_the_one_before_begins_the_count_again():
    assert widths(5, 9, 6, 9, 6, 9, 6, 6) == [9, 9, 9, 9, 9, 9, 6]


def test_plain_decoding_is_wider_for_few_passes():
    assert widths(16, 9, *[1] * 5) == [9, 9, 9, 1, 1, 1]


def test_after_a_prompt_there_is_a_change_in_any_case():
    assert widths(16, 9, 200, 8) == [9, 200, 8]


def test_without_a_price_nothing_is_widened():
    assert widths(0, 9, 8, 9, 1) == [9, 8, 9, 1]


def test_a_pass_has_the_least_rows_at_any_price():
    for price in (0, 16):
        made = PassWidth(price, least=2)
        assert [made.of(count) for count in (1, 2, 1)] == [2, 2, 2]


def test_after_a_reset_the_next_pass_is_the_first():
    made = PassWidth(16)
    made.of(9)
    made.reset()
    assert made.of(8) == 8


class Passes:
    """Passes that take ``row_s`` for each row, and ``change_s`` more when their number changes."""

    def __init__(self, monkeypatch, row_s, change_s):
        self.now, self.rows = 0.0, 0
        self.row_s, self.change_s = row_s, change_s
        monkeypatch.setattr(width, "perf_counter", lambda: self.now)

    def __call__(self, rows):
        self.now += 1.0 + self.row_s * rows + self.change_s * (rows != self.rows)
        self.rows = rows


@pytest.mark.parametrize(
    ("row_s", "change_s", "price"),
    [(0.1, 0.5, 5.0), (0.1, 0.0, 0.0), (0.01, 0.5, MOST_ADDED), (0.0, 0.5, MOST_ADDED)],
)
def test_a_change_is_priced_in_rows(monkeypatch, row_s, change_s, price):
    assert price_of_change(Passes(monkeypatch, row_s, change_s)) == pytest.approx(price)
