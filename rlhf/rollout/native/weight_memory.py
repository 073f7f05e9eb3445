"""The memory of a rank's weights, given back and taken again; the tensors stay the same objects."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf.errors import EngineError
from rlhf.reshard.layout import ParamLayout


class WeightMemory:
    """Of some parameters, and which parts of them hold which tensors (the rest is padding)."""

    def __init__(self, params: Mapping[str, Tensor], held: Sequence[ParamLayout]) -> None:
        self._params, self._held = params, held
        storages = {param.untyped_storage().data_ptr(): param.untyped_storage() for param in params.values()}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        self.is_given_back = False
        self.holds_all = True
        """False from the time it was given back until all weights have come again."""

    def give_back(self) -> int:
        """Bytes; the contents are lost."""
        if self.is_given_back:
            return 0
        for storage, _ in self._sizes:
            storage.resize_(0)
        self.is_given_back, self.holds_all = True, False
        return sum(size for _, size in self._sizes)

    def take_again(self) -> None:
        """Padding is zero; everything else is NaN until it is written."""
        if not self.is_given_back:
            return
        for storage, size in self._sizes:
            storage.resize_(size)
        with torch.no_grad():
            for param in self._params.values():
                param.zero_()
            for one in self._held:
                self._part(one).fill_(torch.nan)
        self.is_given_back = False

    def check_written(self) -> None:
        """After an update: once all of the weights have come, they are whole.

        Raises:
            EngineError: Some of them have not come since they were given back.
        """
        if self.holds_all:
            return
        for one in self._held:
            if bool(self._part(one).isnan().any()):
                raise EngineError(
                    f"native engine: {one.tensor} has not come whole since the weights were given back; needs a "
                    "complete update after sleep(weights=True); call WeightSync.forget() before it"
                )
        self.holds_all = True

    def _part(self, one: ParamLayout) -> Tensor:
        return self._params[one.param][one.param_box(one.box).slices]
