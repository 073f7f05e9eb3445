"""Which layouts a model admits, from its numbers alone."""

from rlhf.config.checks import refuse
from rlhf.config.parallel import ParallelConfig
from rlhf.errors import LayoutError
from rlhf.families.spec import ModelSpec


def check_layout(spec: ModelSpec, parallel: ParallelConfig, *, where: str) -> None:
    """Raise unless a Megatron layout can hold the model.

    Where tp exceeds the number of KV heads, ranks share them: q, k and v are cut evenly inside a group of heads.

    Raises:
        LayoutError: Heads or KV heads cannot be shared out over tp, or what `check_cuts` finds.
        ConfigError: The pipeline stages cannot hold the layers.
    """
    if spec.num_kv_heads % parallel.tp and parallel.tp % spec.num_kv_heads:
        refuse(
            f"{where}.tp: {parallel.tp} does not divide the model's num_kv_heads = {spec.num_kv_heads} and is no "
            f"multiple of it; needs one to divide the other; change {where}.tp",
            LayoutError,
        )
    _divides(f"{where}.tp", parallel.tp, "num_heads", spec.num_heads)
    check_cuts(spec, parallel, where=where)


def check_cuts(spec: ModelSpec, parallel: ParallelConfig, *, where: str) -> None:
    """Raise unless the parameters can be cut evenly: enough for files, which have no heads to keep together.

    Raises:
        LayoutError: The fused q, k and v, their output, or the MLP cannot be cut into tp shards, experts not over ep
            and etp, or a dense model is to be cut so.
        ConfigError: The pipeline stages cannot hold the layers.
    """
    rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    _divides(f"{where}.tp", parallel.tp, "rows of q, k and v", rows)
    _divides(f"{where}.tp", parallel.tp, "columns of the attention's output", spec.num_heads * spec.head_dim)
    if spec.num_experts:
        _divides(f"{where}.ep", parallel.ep, "num_experts", spec.num_experts)
        _divides(f"{where}.etp", parallel.etp, "moe_ffn_size", spec.moe_ffn_size)
    else:
        _divides(f"{where}.tp", parallel.tp, "ffn_size", spec.ffn_size)
        for axis, size in (("ep", parallel.ep), ("etp", parallel.etp)):
            if size > 1:
                refuse(
                    f"{where}.{axis}: {size} given for a {spec.family} model, which has no experts; needs 1; "
                    f"set {where}.{axis}=1",
                    LayoutError,
                )
    parallel.stage_layers(spec.num_layers, where=where)


def _divides(where: str, parts: int, what: str, count: int) -> None:
    if count % parts:
        refuse(
            f"{where}: {parts} does not divide the model's {what} = {count}; needs a divisor; lower {where}",
            LayoutError,
        )
