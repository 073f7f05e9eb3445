"""Bytes that the native engine holds on one rank, from spec and sizes alone; makes no tensor."""

from dataclasses import dataclass
from math import ceil, prod

from rlhf.config.rollout import RolloutConfig
from rlhf.families.spec import ModelSpec
from rlhf.reshard.layout import ITEM_BYTES
from rlhf.rollout.native.layout import local_heads, param_shapes

SPAN_STEP = 16
"""Slots and attention spans are multiples of this: then the last bits of a row do not depend on the span."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBytes:
    """The same on every rank of an engine."""

    weights: int
    kv_cache: int
    """Given back while models train, like the next."""
    packed: int
    """Copies of the matrices in the order of a CPU's kernels."""

    @property
    def awake(self) -> int:
        """Held from `wake` to `sleep`."""
        return self.kv_cache + self.packed


def engine_bytes(spec: ModelSpec, rollout: RolloutConfig, *, dtype: str, on_cpu: bool) -> EngineBytes:
    """Of one rank of an engine."""
    item, (_, kv_heads) = ITEM_BYTES[dtype], local_heads(spec, rollout.tp)
    tokens = ceil(rollout.kv_cache_tokens / SPAN_STEP) * SPAN_STEP
    sizes = {name: prod(shape) for name, shape in param_shapes(spec, rollout.tp).items()}
    looked_up = set() if spec.tied_embeddings else {"embed.weight"}  # by rows, not multiplied with
    multiplied = [size for name, size in sizes.items() if _is_matrix(name) and name not in looked_up]
    return EngineBytes(
        weights=item * sum(sizes.values()),
        kv_cache=item * spec.num_layers * 2 * tokens * kv_heads * spec.head_dim,
        packed=item * sum(multiplied) if on_cpu and dtype == "float32" else 0,
    )


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and not name.endswith("norm.weight")
