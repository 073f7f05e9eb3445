"""Shapes of well-known checkpoints, so that a layout can be studied where the weights are not.

Figures are those of the checkpoints' own config.json; `tests/families/test_published.py` holds the number of parameters
that each implies against the published one. A run never trains from them: it needs the checkpoint itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.families.registry import spec_of
from rlhf.families.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Published:
    """One architecture and the checkpoints that have it."""

    name: str
    """Short name, for command lines."""
    hub_ids: tuple[str, ...]
    """Of the same shapes; the first is the one that the short name means."""
    config: Mapping[str, object]
    """The entries of config.json that say what the model is."""

    @property
    def spec(self) -> ModelSpec:
        """The model as the rest of the code knows it."""
        return spec_of(self.config, where=f"published shapes of {self.name}")


def find_published(name: str) -> Published | None:
    """By short name or hub id, in any case; None for one that is not listed."""
    return _BY_NAME.get(name.lower())


def _llama(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **others: object) -> Mapping[str, object]:
    return {
        **_dense("LlamaForCausalLM", hidden, ffn, layers, heads, kv_heads),
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **others,
    }


def _llama31(
    hidden: int, ffn: int, layers: int, heads: int, *, factor: float = 8.0, **others: object
) -> Mapping[str, object]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _llama(hidden, ffn, layers, heads, 8, rope_scaling=scaling, max_position_embeddings=131072, **others)


def _smollm2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **others: object) -> Mapping[str, object]:
    entries = {"vocab_size": 49152, "rope_theta": 100000.0, "tie_word_embeddings": True, **others}
    return _llama(hidden, ffn, layers, heads, kv_heads, **entries)


def _qwen2(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, tied: bool, vocab_size: int = 152064
) -> Mapping[str, object]:
    return {
        **_dense("Qwen2ForCausalLM", hidden, ffn, layers, heads, kv_heads),
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
    }


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, *, tied: bool) -> Mapping[str, object]:
    return {
        **_dense("Qwen3ForCausalLM", hidden, ffn, layers, heads, 8),
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
    }


def _qwen3_moe(hidden: int, ffn: int, moe_ffn: int, layers: int, heads: int) -> Mapping[str, object]:
    return {
        **_qwen3(hidden, ffn, layers, heads, tied=False),
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": moe_ffn,
        "norm_topk_prob": True,
    }


def _mixtral(hidden: int, ffn: int, layers: int, heads: int) -> Mapping[str, object]:
    return {
        **_dense("MixtralForCausalLM", hidden, ffn, layers, heads, 8),
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }


def _mistral(*, vocab_size: int, window: int | None = None, theta: float = 1e6) -> Mapping[str, object]:
    return {
        **_dense("MistralForCausalLM", 4096, 14336, 32, 32, 8),
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "sliding_window": window,
    }


def _dense(architecture: str, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> Mapping[str, object]:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _meta(*names: str) -> tuple[str, ...]:
    return tuple(f"meta-llama/{name}{kind}" for name in names for kind in ("-Instruct", ""))


def _mistral_ids(version: str) -> tuple[str, ...]:
    return f"mistralai/Mistral-7B-Instruct-{version}", f"mistralai/Mistral-7B-{version}"


def _qwen25(size: str) -> tuple[str, ...]:
    return (f"Qwen/Qwen2.5-{size}-Instruct",)


def _smol(size: str) -> tuple[str, ...]:
    return f"HuggingFaceTB/SmolLM2-{size}-Instruct", f"HuggingFaceTB/SmolLM2-{size}"


PUBLISHED: tuple[Published, ...] = (
    Published("llama3-8b", _meta("Meta-Llama-3-8B"), _llama(4096, 14336, 32, 32, 8)),
    Published("llama3-70b", _meta("Meta-Llama-3-70B"), _llama(8192, 28672, 80, 64, 8)),
    Published("llama3.1-8b", _meta("Llama-3.1-8B"), _llama31(4096, 14336, 32, 32)),
    Published(
        "llama3.1-70b", (*_meta("Llama-3.1-70B"), "meta-llama/Llama-3.3-70B-Instruct"), _llama31(8192, 28672, 80, 64)
    ),
    Published("llama3-405b", _meta("Llama-3.1-405B"), _llama31(16384, 53248, 126, 128)),
    Published(
        "llama3.2-1b",
        _meta("Llama-3.2-1B"),
        _llama31(2048, 8192, 16, 32, factor=32.0, head_dim=64, tie_word_embeddings=True),
    ),
    Published(
        "llama3.2-3b",
        _meta("Llama-3.2-3B"),
        _llama31(3072, 8192, 28, 24, factor=32.0, head_dim=128, tie_word_embeddings=True),
    ),
    Published("qwen2.5-0.5b", _qwen25("0.5B"), _qwen2(896, 4864, 24, 14, 2, tied=True, vocab_size=151936)),
    Published("qwen2.5-1.5b", _qwen25("1.5B"), _qwen2(1536, 8960, 28, 12, 2, tied=True, vocab_size=151936)),
    Published("qwen2.5-3b", _qwen25("3B"), _qwen2(2048, 11008, 36, 16, 2, tied=True, vocab_size=151936)),
    Published("qwen2.5-7b", _qwen25("7B"), _qwen2(3584, 18944, 28, 28, 4, tied=False)),
    Published("qwen2.5-14b", _qwen25("14B"), _qwen2(5120, 13824, 48, 40, 8, tied=False)),
    Published("qwen2.5-32b", _qwen25("32B"), _qwen2(5120, 27648, 64, 40, 8, tied=False)),
    Published("qwen2.5-72b", _qwen25("72B"), _qwen2(8192, 29568, 80, 64, 8, tied=False)),
    Published("qwen3-0.6b", ("Qwen/Qwen3-0.6B",), _qwen3(1024, 3072, 28, 16, tied=True)),
    Published("qwen3-1.7b", ("Qwen/Qwen3-1.7B",), _qwen3(2048, 6144, 28, 16, tied=True)),
    Published("qwen3-4b", ("Qwen/Qwen3-4B",), _qwen3(2560, 9728, 36, 32, tied=True)),
    Published("qwen3-8b", ("Qwen/Qwen3-8B",), _qwen3(4096, 12288, 36, 32, tied=False)),
    Published("qwen3-14b", ("Qwen/Qwen3-14B",), _qwen3(5120, 17408, 40, 40, tied=False)),
    Published("qwen3-32b", ("Qwen/Qwen3-32B",), _qwen3(5120, 25600, 64, 64, tied=False)),
    Published("qwen3-30b-a3b", ("Qwen/Qwen3-30B-A3B",), _qwen3_moe(2048, 6144, 768, 48, 32)),
    Published("qwen3-235b-a22b", ("Qwen/Qwen3-235B-A22B",), _qwen3_moe(4096, 12288, 1536, 94, 64)),
    Published("mistral-7b-v0.1", _mistral_ids("v0.1"), _mistral(vocab_size=32000, window=4096, theta=1e4)),
    Published("mistral-7b", _mistral_ids("v0.3"), _mistral(vocab_size=32768)),
    Published(
        "mixtral-8x7b",
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        _mixtral(4096, 14336, 32, 32),
    ),
    Published("smollm2-135m", _smol("135M"), _smollm2(576, 1536, 30, 9, 3, initializer_range=1 / 24)),
    Published("smollm2-360m", _smol("360M"), _smollm2(960, 2560, 32, 15, 5)),
    Published("smollm2-1.7b", _smol("1.7B"), _smollm2(2048, 8192, 24, 32, 32, rope_theta=130000.0)),
)
"""Models of the families here, by family and size."""

_BY_NAME = {key.lower(): one for one in PUBLISHED for key in (one.name, *one.hub_ids)}
