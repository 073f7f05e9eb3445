"""Activations and gradients between pipeline stages that hold several model chunks, each way over a group of its own.

Two stages are each other's next and previous one, so a message from the peer can be an activation or a gradient.
Upstream tells them apart by the order in which both ends happen to post them: batched, that order is wrong at pp 2
and training goes wrong in silence; unbatched, one direction runs over the whole job's group. Here a gradient cannot be
taken for an activation, whatever the order.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from rlhf.mcore.model import MegatronModel


class InterleavedP2P(P2PCommunicator):
    """One rank's messages of one run of the interleaved schedule.

    Shapes do not travel: pipeline peers hold the same microbatches, and the schedule's table says in which order their
    tensors come in. So nothing waits for a shape, and messages stay asynchronous though lengths differ.
    """

    def __init__(self, model: MegatronModel, rows: Sequence[int]) -> None:
        """`rows`: of each microbatch's tensor between stages (tokens, divided by tp under sequence parallelism)."""
        groups, config = model.groups, model.config
        assert groups.collection is not None, "interleaved_p2p: a rank outside the model's pool"
        assert groups.pp_gradients is not None, "interleaved_p2p: groups of a layout without chunks; needs its own"
        modes = (config.overlap_p2p_comm, config.batch_p2p_comm)
        assert modes == (True, False), f"interleaved_p2p: overlap_p2p_comm, batch_p2p_comm {modes}; needs True, False"
        super().__init__(groups.collection.pp, config)
        self._activations: ProcessGroup = groups.collection.pp
        self._gradients, self._device = groups.pp_gradients, model.device
        table = get_schedule_table(
            len(rows), config.virtual_pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage
        )
        # The model's first chunk receives no activation, its last no gradient; backward passes go through the chunks
        # from the last to the first, microbatches in the same order.
        self._activation_rows = iter([rows[m] for m, chunk in table if chunk or not groups.is_first_stage])
        self._gradient_rows = iter([rows[m] for m, chunk in table if chunk or not groups.is_last_stage])

    def check_done(self, *, forward_only: bool) -> None:
        """Assert that everything that the table foretold has come in."""
        left = len(list(self._activation_rows)) + (0 if forward_only else len(list(self._gradient_rows)))
        assert not left, f"interleaved_p2p: {left} messages of the schedule's table never came"

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: object,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Work] | None]:
        """As upstream's, which all its public methods end in; the fixed shape is ignored."""
        del tensor_shape
        from_prev = self._empty(self._activation_rows) if recv_prev else None
        from_next = self._empty(self._gradient_rows) if recv_next else None
        posts: list[tuple[str, Callable[..., Work | None], Tensor | None, int, ProcessGroup]] = [
            ("send_next", dist.isend, tensor_send_next, self.next_rank, self._activations),
            ("recv_prev", dist.irecv, from_prev, self.prev_rank, self._activations),
            ("send_prev", dist.isend, tensor_send_prev, self.prev_rank, self._gradients),
            ("recv_next", dist.irecv, from_next, self.next_rank, self._gradients),
        ]
        if self.pp_group.rank() % 2:  # neighbours post in opposite orders: no ring of ranks that all wait in a send
            posts = [posts[1], posts[0], posts[3], posts[2]]
        requests = {}
        for name, post, tensor, peer, group in posts:
            if tensor is not None and (work := post(tensor, peer, group=group)) is not None:
                requests[name] = work
        if not wait_on_reqs:
            return from_prev, from_next, requests
        for request in requests.values():
            request.wait()
        return from_prev, from_next, None

    def _empty(self, rows: Iterator[int]) -> Tensor:
        return torch.empty(
            (next(rows), 1, self.config.hidden_size),
            requires_grad=True,
            device=self._device,
            dtype=self.config.pipeline_dtype,
        )
