"""Texts of people and tokens of a model: by the tokenizer of a model folder, where it has one."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.data.ragged import Ragged
from rlhf.data.tokenizer import TextOf, decode_responses, eos_token_ids, load_tokenizer
from rlhf.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FolderTexts:
    """What a folder knows of texts; a folder with weights alone knows nothing, and says so when it is asked."""

    def __init__(self, folder: Path | None, *, weights: Path) -> None:
        """`folder`: that with tokenizer and config.json, if there is any; `weights`: for messages."""
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._missing = f"{weights}: no tokenizer beside the weights"
        self.end_ids: tuple[int, ...] = ()
        """Tokens that end a response, as far as the folder names any."""
        self.decode: TextOf | None = None
        """Text of a response while it grows, for stop strings."""
        if folder is None:
            return
        try:
            self._tokenizer, self.decode = load_tokenizer(folder), TextOf(folder)
        except CheckpointError as error:
            self._missing = str(error)
        with suppress(CheckpointError):  # rows then end by their length alone
            self.end_ids = eos_token_ids(self._tokenizer, folder)

    def read_like(self, other: "FolderTexts | None") -> bool:
        """Whether tokens are the same texts there, so that one engine can look for stop strings in both."""
        mine, others = self._tokenizer, None if other is None else other._tokenizer
        if mine is None or others is None:
            return other is not None and mine is others
        return _spelling(mine) == _spelling(others)

    def encode(self, number: int, text: str, *, chat: bool) -> list[int]:
        """Tokens of prompt `number`.

        Raises:
            DataError: There is no tokenizer, or no chat template where one is asked for.
        """
        if self._tokenizer is None:
            raise DataError(
                f"generate: prompt {number} is a text, but there is no tokenizer ({self._missing}); needs one, or "
                "token ids"
            )
        if chat and not self._tokenizer.chat_template:
            raise DataError(
                "generate: chat=True, but the tokenizer has no chat template; needs one; leave chat out, or take a "
                "chat model"
            )
        if chat:
            message = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        # A chat template writes its own special tokens; plain text gets the tokenizer's (such as a leading BOS).
        found: list[int] = self._tokenizer(text, add_special_tokens=not chat).input_ids
        return found

    def read(self, responses: Ragged) -> list[str]:
        """Text of each row, special tokens left out; empty without a tokenizer."""
        if self._tokenizer is None:
            return [""] * len(responses.lengths)
        return decode_responses(self._tokenizer, responses)


def _spelling(tokenizer: "PreTrainedTokenizerBase") -> object:
    """What its decoding depends on."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    return type(tokenizer), tokenizer.get_vocab()
