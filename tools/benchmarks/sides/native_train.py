"""Side `native`: our `train_step` on Megatron-Core. `... native_train MODEL_FOLDER THREADS`."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tools.benchmarks.measure import timed
from tools.benchmarks.side import Handler, serve

TINY_LR = 1e-12
"""Steps are taken, but the weights stay where they are, so that all runs do the same."""


def start() -> tuple[Handler, Mapping[str, str]]:
    """Build the model and its optimizer in a job of one rank."""
    import torch  # noqa: PLC0415  # imports are reported as the side's own
    import torch.distributed as dist  # noqa: PLC0415

    import rlhf  # noqa: PLC0415
    from rlhf.config.model import ModelConfig, OptimConfig  # noqa: PLC0415
    from rlhf.config.parallel import ParallelConfig  # noqa: PLC0415
    from rlhf.data.batch import Sequences  # noqa: PLC0415
    from rlhf.data.ragged import Ragged  # noqa: PLC0415
    from rlhf.dist.groups import GroupFactory  # noqa: PLC0415
    from rlhf.families.registry import read_spec  # noqa: PLC0415
    from rlhf.families.spec import Head  # noqa: PLC0415
    from rlhf.mcore.groups import make_groups  # noqa: PLC0415
    from rlhf.mcore.load import set_weights  # noqa: PLC0415
    from rlhf.mcore.model import build_model  # noqa: PLC0415
    from rlhf.mcore.optimizer import build_optimizer  # noqa: PLC0415
    from rlhf.mcore.train_step import StepReport, train_step  # noqa: PLC0415
    from rlhf.trainers.losses import make_answer_loss  # noqa: PLC0415
    from rlhf.trainers.sft import answer_rows  # noqa: PLC0415
    from tools.benchmarks.profile import profiled  # noqa: PLC0415

    torch.set_num_threads(int(sys.argv[2]))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel, config = ParallelConfig(), ModelConfig(path=sys.argv[1])
    model = build_model(
        read_spec(Path(config.path)),
        config,
        parallel,
        make_groups(parallel, GroupFactory(device_backend="gloo", timeout=timedelta(minutes=5))),
        head=Head.LM,
        device=torch.device("cpu"),
        seed=1,
        trainable=True,
    )
    set_weights(model, config)
    optimizer = build_optimizer(model, OptimConfig(lr=TINY_LR))
    update, in_optimizer = optimizer.step, list[float]()

    def timed_update() -> Any:
        began = time.perf_counter()
        report = update()
        in_optimizer.append(time.perf_counter() - began)
        return report

    optimizer.step = timed_update  # type: ignore[method-assign]

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        tokens = [torch.tensor(ids) for ids in request["rows"]]
        rows = answer_rows(
            Sequences(
                sample_ids=torch.arange(len(tokens)),
                tokens=Ragged.of(tokens, dtype=torch.int64),
                response_lengths=torch.tensor(request["responses"]),
            )
        )
        loss, found = make_answer_loss(float(sum(request["responses"]))), list[StepReport]()

        def step() -> None:
            found.append(train_step(model, optimizer, rows, loss, microbatch_tokens=request["microbatch_tokens"]))

        if request.get("profile"):
            return {"profile": profiled(step)}
        seconds = timed(step)
        return {
            "step_s": seconds,
            "model_s": seconds - in_optimizer[-1],
            "loss": found[0].stats["loss"],
            "grad_norm": found[0].grad_norm,
            "passes": -(-sum(map(len, tokens)) // request["microbatch_tokens"]),
            "padded_tokens": sum(map(len, tokens)),
        }

    return handle, {"rlhf": rlhf.__version__}


if __name__ == "__main__":
    serve(start)
