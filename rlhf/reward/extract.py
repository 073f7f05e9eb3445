"""Finding the answer in a response, by rules simple enough to explain to a model."""

import re
from decimal import Decimal

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
TAGGED = re.compile(
    r"<answer>(.*?)</answer>|\\boxed\{([^{}]*)\}|####\s*([^\n]+)|\banswer\s*(?:is\s*:?|:)\s*([^\n]+)",
    re.IGNORECASE | re.DOTALL,
)


def whole(text: str) -> str:
    """The response itself, without white space around it."""
    return text.strip()


def last_number(text: str) -> str:
    """The last number, without thousands separators; empty when there is none."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "").removeprefix("+") if found else ""


def tagged(text: str) -> str:
    r"""What stands in the last <answer>...</answer> or \boxed{...}, or after the last `####`, `answer:` or `answer is`.

    Empty when there is none of them. A full stop at the end is left out.
    """
    found = TAGGED.findall(text)
    return next(filter(None, found[-1])).strip().removesuffix(".").strip() if found and any(found[-1]) else ""


def same_number(one: str, other: str) -> bool:
    """Whether both are numbers, and equal: 2.50 equals 2.5."""
    return bool(NUMBER.fullmatch(one) and NUMBER.fullmatch(other)) and (
        Decimal(one.replace(",", "")) == Decimal(other.replace(",", ""))
    )
