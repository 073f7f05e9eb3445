import pytest

from rlhf.reward.extract import last_number, same_number, tagged


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The sum is 12.", "12"),
        ("3 + 4 = 7", "7"),
        ("costs $1,234.50 now", "1234.50"),
        ("-5", "-5"),
        ("+5", "5"),
        ("1,2,3", "3"),
        ("none", ""),
        ("", ""),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 42 </answer>", "42"),
        ("<answer>1</answer> or <answer>two\nlines</answer>", "two\nlines"),
        (r"so \boxed{x+1}.", "x+1"),
        ("work...\n#### 72", "72"),
        ("The answer is 5.", "5"),
        ("Answer: yes", "yes"),
        ("the answer is: no.\nbye", "no"),
        ("<answer></answer>", ""),
        ("nothing marked", ""),
    ],
)
def test_tagged(text, answer):
    assert tagged(text) == answer


def test_same_number_compares_values():
    assert same_number("2.50", "2.5")
    assert same_number("1,000", "1000")
    assert not same_number("2", "3")
    assert not same_number("", "")
    assert not same_number("two", "two")
