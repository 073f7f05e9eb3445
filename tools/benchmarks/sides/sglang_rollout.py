"""Side `sglang`: our engine on SGLang, as a leader rank has it. `... sglang_rollout MODEL_FOLDER THREADS`.

Answers tell what a call cost beside SGLang's own work: processor seconds of this process and of the host's, and how
long it took at its edges, from the call to the first request in SGLang's hands and from its last answer to the return.
"""

import atexit
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.benchmarks.measure import family, processor_s
from tools.benchmarks.side import Handler, serve
from tools.benchmarks.work import KV_TOKENS, MOST_RUNNING


def start() -> tuple[Handler, Mapping[str, str]]:
    """Start the engine and bring the folder's weights in, by the way of a sync."""
    import torch  # noqa: PLC0415  # imports are reported as the side's own

    import rlhf  # noqa: PLC0415
    from rlhf.config.rollout import RolloutConfig, SamplingConfig  # noqa: PLC0415
    from rlhf.data.batch import PromptBatch, PromptRecord  # noqa: PLC0415
    from rlhf.data.ragged import Ragged  # noqa: PLC0415
    from rlhf.families.files import HfFolder  # noqa: PLC0415
    from rlhf.families.registry import read_spec  # noqa: PLC0415
    from rlhf.reshard.from_store import fill  # noqa: PLC0415
    from rlhf.rollout.ledger import Ledger  # noqa: PLC0415
    from rlhf.rollout.sglang import run  # noqa: PLC0415
    from rlhf.rollout.sglang.engine import SGLangEngine  # noqa: PLC0415
    from rlhf.rollout.sglang.wire import Response, Times  # noqa: PLC0415

    times, report_times = list[Times](), run.report_times

    def heard(ledger: Ledger, response: Response) -> None:
        times.append(response.times)
        report_times(ledger, response)

    run.report_times = heard
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
    atexit.register(engine.close)
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
        engine.sleep()  # empties the prefix cache: each run would find the prompts of the one before
        engine.wake()
        times.clear()
        pids = [os.getpid(), *family(engine.host_pid)]
        before, begin = [processor_s(pid) for pid in pids], time.monotonic()
        rollout = engine.generate(batch, sampling)
        end = time.monotonic()
        leader, host, *rest = (processor_s(pid) - then for pid, then in zip(pids, before, strict=True))
        assert rollout is not None, "this process leads its engine"
        return {
            "seconds": end - begin,
            "responses": [row.tolist() for row in rollout.responses.rows()],
            "processor_s": {"leader": leader, "front": host, "rest": sum(rest)},
            "edges_s": min(one.received for one in times) - begin + end - max(one.ended for one in times),
        }

    return handle, {"rlhf": rlhf.__version__}


if __name__ == "__main__":
    serve(start)
