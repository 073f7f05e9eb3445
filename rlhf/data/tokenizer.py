"""The tokenizer of a model folder, read offline, and a tiny one made on the spot.

The vocabulary of the model may be larger than the tokenizer's; nothing here knows the model.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.data.ragged import Ragged
from rlhf.errors import CheckpointError

if TYPE_CHECKING:  # importing transformers' tokenizers takes seconds, which ranks without rows do not pay
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

EOS, PAD = "<|end|>", "<|pad|>"
PLAIN = ("llama", "qwen3", "qwen3_moe")
"""Kinds of models whose tokenizer_config.json AutoTokenizer trusts; for some others it knows better."""


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Tokenizer of a Hugging Face model folder; never the network, never code from the folder.

    Raises:
        CheckpointError: The folder holds none that transformers can read.
    """
    try:
        reader = _reader(folder)
        found = reader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if not set(found.get_vocab().values()) - set(found.all_special_ids):
            raise ValueError("it knows no word")  # transformers makes one up from config.json where no file is
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"{folder}: no tokenizer could be read ({type(error).__name__}: {str(error).splitlines()[0]}); needs "
            "tokenizer.json and tokenizer_config.json; copy them from the model the checkpoint came from"
        ) from error
    return found


def _reader(folder: Path) -> "type[PreTrainedTokenizerFast] | type[AutoTokenizer]":
    """The class to read the folder with.

    AutoTokenizer imports every kind of model, two seconds a process. Where the folder says that its tokenizer.json is
    all there is to it, as those that are made here do, AutoTokenizer would come to the plain class too.
    """
    model, tokenizer = (_json(folder / name) for name in ("config.json", "tokenizer_config.json"))
    if (
        tokenizer.get("tokenizer_class") == "TokenizersBackend"
        and "auto_map" not in tokenizer
        and model.get("model_type", PLAIN[0]) in PLAIN
        and (folder / "tokenizer.json").is_file()
    ):
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer


def _json(path: Path) -> dict:
    return json.loads(path.read_text()) if path.is_file() else {}


def check_vocabulary(
    tokenizer: "PreTrainedTokenizerBase", eos_token_ids: Iterable[int], vocab_sizes: Mapping[str, int]
) -> None:
    """Whether every model has a row for each token of a prompt or a response.

    Special tokens but the end tokens are left out: a pad token beyond the model's vocabulary is common and never used.

    Args:
        tokenizer: Of the actor; all roles read its tokens.
        eos_token_ids: Tokens that end a response.
        vocab_sizes: Of each role's model.

    Raises:
        CheckpointError: A role's model is too small.
    """
    used = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids) | set(eos_token_ids)
    for role, size in vocab_sizes.items():
        if max(used) >= size:
            raise CheckpointError(
                f"{role}.model.path: its config.json has vocab_size = {size}, but the actor's tokenizer gives ids up "
                f"to {max(used)}; needs a row for each; take a model and a tokenizer that belong together"
            )


def eos_token_ids(tokenizer: "PreTrainedTokenizerBase | None", folder: Path) -> tuple[int, ...]:
    """Token ids that end a response: the tokenizer's own first, then those of generation_config.json and config.json.

    Raises:
        CheckpointError: None of the three names one.
    """
    found = [] if tokenizer is None else [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.exists():
            stated = json.loads(path.read_text()).get("eos_token_id")
            found += stated if isinstance(stated, list) else [stated]
    ids = tuple(dict.fromkeys(token for token in found if token is not None))
    if not ids:
        raise CheckpointError(
            f"{folder}: no end-of-sequence token in tokenizer, generation_config.json or config.json; a response could "
            "never end; add eos_token_id to generation_config.json"
        )
    return ids


def decode_responses(tokenizer: "PreTrainedTokenizerBase", responses: Ragged) -> list[str]:
    """Text of each row of token ids, special tokens left out."""
    rows = [row.tolist() for row in responses.rows()]
    if not rows:  # transformers 5 takes no rows for one without tokens
        return []
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclass(slots=True)
class TextOf:
    """Text of token ids, special tokens included, by the tokenizer of a model folder.

    It is read when it is first needed, and not pickled: another process reads it again.
    """

    folder: Path
    _tokenizer: "PreTrainedTokenizerBase | None" = field(default=None, repr=False, compare=False)

    def __call__(self, tokens: Sequence[int]) -> str:
        """Of one response, or of a part of it; part of a character becomes U+FFFD."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return TextOf, (self.folder,)


def tiny_tokenizer(folder: Path, corpus: Iterable[str] = (), *, vocab_size: int = 0) -> "PreTrainedTokenizerFast":
    """Byte-level tokenizer, saved in folder so that `load_tokenizer` reads it: 256 bytes, an end token, a pad token.

    Any text survives encode and decode. Each digit is a token of its own, whatever is learned. With a corpus, merges
    are learned from it until there are vocab_size tokens (or nothing is left to merge), so that the fixed words of a
    task cost few tokens; a merge may reach over spaces, so that a whole phrase can become one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size, 258),
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.save_pretrained(str(folder))
    return tokenizer
