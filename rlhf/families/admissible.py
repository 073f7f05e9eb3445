"""Which layouts a model admits, from its numbers alone."""

from rlhf.config.checks import refuse
from rlhf.config.parallel import ParallelConfig
from rlhf.errors import LayoutError
from rlhf.families.spec import ModelSpec


def check_layout(spec: ModelSpec, parallel: ParallelConfig, *, where: str) -> None:
    """Raise unless a Megatron layout can hold the model.

    Raises:
        LayoutError: Heads, KV heads or the MLP cannot be cut into tp shards, or the model has experts.
        ConfigError: The pipeline stages cannot hold the layers.
    """
    if spec.num_experts:
        refuse(f"{where}: a {spec.family} model given; needs one without experts; choose a dense model", LayoutError)
    for what, count in (
        ("num_kv_heads", spec.num_kv_heads),
        ("num_heads", spec.num_heads),
        ("ffn_size", spec.ffn_size),
    ):
        if count % parallel.tp:
            refuse(
                f"{where}.tp: {parallel.tp} does not divide the model's {what} = {count}; "
                f"needs a divisor; lower {where}.tp",
                LayoutError,
            )
    parallel.stage_layers(spec.num_layers, where=where)
