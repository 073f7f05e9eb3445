"""Side `native`: our embedded engine. `python -m tools.benchmarks.sides.native_rollout MODEL_FOLDER THREADS`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.benchmarks.measure import timed
from tools.benchmarks.side import Handler, serve


def start() -> tuple[Handler, Mapping[str, str]]:
    """Load the model into an engine."""
    import torch  # noqa: PLC0415  # imports are reported as the side's own

    import rlhf  # noqa: PLC0415
    from rlhf.config.rollout import RolloutConfig, SamplingConfig  # noqa: PLC0415
    from rlhf.data.batch import PromptBatch, PromptRecord, Rollout  # noqa: PLC0415
    from rlhf.data.ragged import Ragged  # noqa: PLC0415
    from rlhf.families.files import HfFolder  # noqa: PLC0415
    from rlhf.families.registry import read_spec  # noqa: PLC0415
    from rlhf.rollout.native.engine import NativeEngine  # noqa: PLC0415
    from tools.benchmarks.profile import profiled  # noqa: PLC0415

    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)

    def make_engine(rows: int, tokens: int) -> NativeEngine:
        engine = NativeEngine(
            read_spec(folder),
            RolloutConfig(max_running=rows, kv_cache_tokens=rows * (tokens + 16)),
            tp_group=None,
            cpu_group=None,
            device=torch.device("cpu"),
            dtype=torch.float32,
            run_seed=1,
            eos_token_ids=(),
        )
        source, params = HfFolder(folder), engine.params()
        for piece in engine.layout().holdings(0):
            target = params[piece.param][piece.param_box(piece.box).slices]
            target.copy_(source.read(piece.tensor, piece.box.slices))
        return engine

    made: dict[tuple[int, int], NativeEngine] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        rows = [torch.tensor(ids) for ids in request["prompts"]]
        batch = PromptBatch(
            sample_ids=torch.arange(len(rows)),
            prompt_ids=torch.arange(len(rows)),
            tokens=Ragged.of(rows, dtype=torch.int64),
            records=(PromptRecord("", "", {}),) * len(rows),
        )
        sampling = SamplingConfig(
            temperature=0.0 if request["greedy"] else 1.0, max_new_tokens=request["new_tokens"], ignore_eos=True
        )
        size = (max(16, len(rows)), max(map(len, request["prompts"])) + 64)
        if size not in made:
            made.clear()
            made[size] = make_engine(*size)
        engine, found = made[size], list[Rollout]()

        def generate() -> None:
            rollout = engine.generate(batch, sampling)
            assert rollout is not None, "this process leads its engine"
            found.append(rollout)

        if request.get("profile"):
            return {"profile": profiled(generate)}
        seconds = timed(generate)
        return {"seconds": seconds, "responses": [row.tolist() for row in found[0].responses.rows()]}

    return handle, {"rlhf": rlhf.__version__}


if __name__ == "__main__":
    serve(start)
