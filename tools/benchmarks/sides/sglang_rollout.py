"""Side `sglang`: our engine on SGLang, as a leader rank has it. `... sglang_rollout MODEL_FOLDER THREADS`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.benchmarks.measure import timed
from tools.benchmarks.side import Handler, serve
from tools.benchmarks.work import KV_TOKENS, MOST_RUNNING


def start() -> tuple[Handler, Mapping[str, str]]:
    """Start the engine and bring the folder's weights in, by the way of a sync."""
    import torch  # noqa: PLC0415  # imports are reported as the side's own

    import rlhf  # noqa: PLC0415
    from rlhf.config.rollout import RolloutConfig, SamplingConfig  # noqa: PLC0415
    from rlhf.data.batch import PromptBatch, PromptRecord, Rollout  # noqa: PLC0415
    from rlhf.data.ragged import Ragged  # noqa: PLC0415
    from rlhf.families.files import HfFolder  # noqa: PLC0415
    from rlhf.families.registry import read_spec  # noqa: PLC0415
    from rlhf.reshard.from_store import fill  # noqa: PLC0415
    from rlhf.rollout.sglang.engine import SGLangEngine  # noqa: PLC0415

    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    engine = SGLangEngine(
        read_spec(folder),
        RolloutConfig(engine="sglang", max_running=MOST_RUNNING, kv_cache_tokens=KV_TOKENS),
        tp_group=None,
        cpu_group=None,
        device=torch.device("cpu"),
        dtype=torch.float32,
        run_seed=1,
        eos_token_ids=(),
    )
    source = HfFolder(folder)
    fill(engine.layout(), {0: engine.params()}, lambda name, box: source.read(name, box.slices).float())
    engine.weights_updated(1)

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
        found: list[Rollout] = []

        def generate() -> None:
            rollout = engine.generate(batch, sampling)
            assert rollout is not None, "this process leads its engine"
            found.append(rollout)

        engine.sleep()  # empties the prefix cache: each run would find the prompts of the one before
        engine.wake()
        seconds = timed(generate)
        return {"seconds": seconds, "responses": [row.tolist() for row in found[0].responses.rows()]}

    return handle, {"rlhf": rlhf.__version__}


if __name__ == "__main__":
    serve(start)
