"""Strings that end a response, found in the text of its last tokens. All engines end responses by this file.

Knows no tokenizer: it is handed a function from token ids to text. Imports nothing heavy, for SGLang's schedulers
run it too.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included. Picklable, for engines whose processes match by themselves."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What part of a character decodes to."""


class StopStrings:
    """Whether a response's newest token completes one of some strings.

    A response ends with the first token after which the text of its last `span` tokens holds one of them. As every
    token stands for at least one byte, `span` tokens hold all of a string that the newest token completes, and one
    more, so that a tokenizer that drops the space in front of a text drops none of the string's.
    """

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        assert texts, "a response that no string ends needs no search"
        self._texts, self._decode = tuple(texts), decode
        self._ends = {text[-1] for text in texts}
        self.span = max(len(text.encode()) for text in texts) + 1
        self._may_complete: dict[int, bool] = {}

    def ended(self, response: Sequence[int]) -> bool:
        """Whether the last of these tokens ends it; at least the last `span` of the response's are needed."""
        return bool(response) and self._is_an_end(response[-1]) and self._holds_one(response[-self.span :])

    def _holds_one(self, tokens: Sequence[int]) -> bool:
        text = self._decode(list(tokens))
        return any(stop in text for stop in self._texts)

    def _is_an_end(self, token: int) -> bool:
        """Whether the token's text holds the last character of a string, or might; most tokens' does not."""
        if (known := self._may_complete.get(token)) is None:
            text = self._decode([token, token])  # the second one keeps the space in front of it
            known = not text or UNFINISHED in text or not self._ends.isdisjoint(text)
            self._may_complete[token] = known
        return known
