"""From a row's prompt to the text and the tokens that the model sees."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from rlhf.config.data import DataConfig
from rlhf.data.record import PromptRecord
from rlhf.data.rows import BadRowError, Messages, Row
from rlhf.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row ready for the model."""

    record: PromptRecord
    token_ids: list[int]


class PromptEncoder:
    """Wraps prompts in the tokenizer's chat template, or takes them as plain text, and cuts them into tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", config: DataConfig) -> None:
        """Take the tokenizer and the data settings.

        Raises:
            ConfigError: The settings ask for a chat template that the tokenizer has not, for a system prompt without
                one, or for one that the template refuses.
        """
        self.tokenizer, self.config = tokenizer, config
        if config.chat_template and not tokenizer.chat_template:
            raise ConfigError(
                f"data.chat_template: true, but the tokenizer of {tokenizer.name_or_path or 'the model'} has none; "
                "set data.chat_template=false for plain text, or take a chat model"
            )
        if config.system_prompt and not config.chat_template:
            raise ConfigError(
                "data.system_prompt: given, but data.chat_template is false and plain text has no system message; "
                "set data.system_prompt= to nothing, or data.chat_template=true"
            )
        try:
            bare = self.render("")
        except BadRowError as error:
            raise ConfigError(
                f"data.chat_template: {error} (asked for a plain question"
                f"{' after data.system_prompt' if config.system_prompt else ''}); set data.system_prompt= to nothing, "
                "or data.chat_template=false"
            ) from error
        self.extra_tokens = len(self._token_ids(bare)) + 1  # a sentencepiece tokenizer may put a blank in front

    def render(self, prompt: str | Messages) -> str:
        """The text that the model sees.

        Raises:
            BadRowError: The prompt is a chat without a template to write it, or the template refuses it.
        """
        if not self.config.chat_template:
            if not isinstance(prompt, str):
                raise BadRowError("a list of messages, but data.chat_template is false; needs text")
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.config.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise BadRowError(f"the chat template refuses it: {error}") from error

    def encode(self, row: Row) -> Prompt:
        """The row's text and tokens, cut at the left end to data.max_prompt_tokens.

        Raises:
            BadRowError: As of render, or nothing is left of the prompt.
        """
        text, limit = self.render(row.prompt), self.config.max_prompt_tokens
        token_ids = self._token_ids(text)
        if len(token_ids) > limit:
            token_ids = token_ids[-limit:]
            text = self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        if not token_ids:
            raise BadRowError("the prompt has no tokens")
        return Prompt(PromptRecord(text, row.answer, row.entry), token_ids)

    def overlong(self, prompt: str | Messages) -> bool:
        """Whether the prompt has more than data.max_prompt_tokens tokens.

        Plain ASCII with fewer characters than there is room for is not tokenised: no token spans less than one. (Other
        text may grow when a tokenizer normalises it.)

        Raises:
            BadRowError: As of render.
        """
        limit = self.config.max_prompt_tokens
        if isinstance(prompt, str) and prompt.isascii() and len(prompt) + self.extra_tokens <= limit:
            return False
        return len(self._token_ids(self.render(prompt))) > limit

    def _token_ids(self, text: str) -> list[int]:
        # A chat template writes its own special tokens; plain text gets the tokenizer's (such as a leading BOS).
        return self.tokenizer(text, add_special_tokens=not self.config.chat_template).input_ids
