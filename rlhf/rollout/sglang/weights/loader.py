"""Inside an SGLang scheduler: weights from windows into the fused parameters of its tensor-parallel rank.

`Loading` serves one transfer after the other of the rank at the other end of a channel. It compares what comes with the
model's own names, shapes and dtypes, casts nothing, counts what was filled, and sums what it holds. It knows the
model as a torch module only, so it also runs without SGLang.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from rlhf.errors import EngineError, LayoutError, WeightSyncError
from rlhf.reshard.cells import Cells
from rlhf.reshard.checksum import Place, Weighted, sums_in, twice
from rlhf.reshard.layout import Box, ParamLayout
from rlhf.rollout.sglang.layout import folded
from rlhf.rollout.sglang.weights.channel import Channel, knock
from rlhf.rollout.sglang.weights.manifest import Coming, as_box, read_manifest
from rlhf.rollout.sglang.weights.regions import attach

_ATTRIBUTE = "rlhf_loading"
"""Where a model keeps its `Loading` between transfers."""


@dataclass(frozen=True, slots=True)
class ServeTransfer:
    """An errand for a scheduler: serve the rank behind a door until it says that the transfer is over."""

    door: str

    def run(self, model: torch.nn.Module) -> None:
        """Called in the scheduler, while a weight update is open."""
        loading = getattr(model, _ATTRIBUTE, None)
        if loading is None or loading.door != self.door:
            loading = Loading(model, self.door)
            setattr(model, _ATTRIBUTE, loading)
        loading.serve()


class Loading:
    """A scheduler's end of the channel to its rank, and the state of the transfer under way."""

    def __init__(self, model: torch.nn.Module, door: str) -> None:
        self.door = door
        self._model = model
        self._channel: Channel = knock(door, peer="the rank of this scheduler")
        self._regions: tuple[Tensor, ...] = ()
        self._coming: dict[str, Coming] = {}
        self._fits: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}
        """Table of the model that a manifest was found to fit."""
        self._transfer: _Transfer | None = None
        self._has_all = False

    def serve(self) -> None:
        """Do as the rank says until it says `end`.

        Raises:
            EngineError: The rank is gone.
        """
        while (told := self._channel.receive())["do"] != "end":
            try:
                reply = self._do(told)
            except (WeightSyncError, LayoutError, EngineError) as error:
                self._has_all = False
                self._transfer = None
                reply = {"error": str(error)}
            self._channel.send(reply)
        self._transfer = None

    def _do(self, told: Mapping[str, Any]) -> dict[str, Any]:
        verb = told["do"]
        if verb == "describe":
            return {"table": table(self._model)}
        if verb == "regions":
            self._attach(told)
            return {}
        if verb == "begin":
            self._begin(told)
            return {}
        if self._transfer is None:
            raise WeightSyncError(f"weight update: {verb} without a transfer; an earlier step of it was refused")
        if verb == "window":
            self._transfer.load(told["number"], self._regions)
        elif verb == "finish":
            self._transfer.finish(self._model)
            self._has_all = self._has_all or self._transfer.coming.complete
        else:
            assert verb == "sums", verb
            places = [(tensor, as_box(spans)) for tensor, spans in told["places"]]
            return {"sums": self._transfer.sums(places, brief=told["brief"])}
        return {}

    def _attach(self, told: Mapping[str, Any]) -> None:
        fd = self._channel.receive_fd() if told["has_fd"] else None
        self._regions = attach(told["regions"], fd)
        if fd is not None:
            os.close(fd)  # the mapping stays

    def _begin(self, told: Mapping[str, Any]) -> None:
        """A manifest comes once; later transfers name it."""
        number = told["id"]
        if "manifest" in told:
            self._coming[number] = read_manifest(told["manifest"])
            self._fits.pop(number, None)
        coming = self._coming[number]
        if told["anew"]:
            self._has_all = False
        if not coming.complete and not self._has_all:
            raise WeightSyncError(
                "weight update: some of the weights were sent to an engine that does not hold the others; needs a "
                "complete transfer first, after a start, a release of memory or a failure"
            )
        check_unpacked(self._model)
        params, described = own_params(self._model), table(self._model)
        if self._fits.get(number) != described:  # it need not be worked out again while the model stays as it is
            check_held(coming, params)
            if coming.complete:
                check_covered(coming)
            self._fits[number] = described
        self._transfer = _Transfer(coming, params)
        if coming.complete:
            self._has_all = False  # until the end of it


class _Transfer:
    """One transfer into one model."""

    def __init__(self, coming: Coming, params: Mapping[str, Tensor]) -> None:
        self.coming = coming
        self._params = params
        self._is_loaded = [False] * len(coming.windows)
        self._has_finished = False

    def load(self, number: int, regions: Sequence[Tensor]) -> None:
        """Copy a window's pieces into the parameters; done when this returns."""
        if not 0 <= number < len(self._is_loaded) or self._is_loaded[number]:
            raise WeightSyncError(f"weight update: window {number} of {len(self._is_loaded)} came twice or is unknown")
        region = regions[number % len(regions)]
        with torch.no_grad():
            for landing in self.coming.windows[number]:
                flat = region[landing.at : landing.at + landing.box.num_elements]
                self._view(landing.one, landing.box).copy_(flat.view(landing.box.shape))
        _settle(region)
        self._is_loaded[number] = True

    def finish(self, model: torch.nn.Module) -> None:
        """Nothing may be missing. Then what SGLang's own loaders do at the end of a load, once."""
        missing = [number for number, loaded in enumerate(self._is_loaded) if not loaded]
        if missing or self._has_finished:
            raise WeightSyncError(
                f"weight update: finished with windows {missing} not loaded"
                if missing
                else "weight update: finished twice"
            )
        with torch.no_grad():
            for repeat in self.coming.repeats:
                self._view(repeat.second, repeat.box).copy_(self._view(repeat.first, repeat.box))
        after_load = getattr(model, "post_load_weights", None)
        if after_load is not None:
            after_load()
        self._has_finished = True

    def sums(self, places: Sequence[Place], *, brief: bool) -> list[int]:
        """Checksum of what the rank holds inside each place, from the parameters; what is held twice counts once."""
        return sums_in(places, self._blocks, brief=brief)

    def _blocks(self, tensor: str) -> Iterator[Weighted]:
        yield from ((1, one.box, self._view(one, one.box)) for one in self.coming.held.get(tensor, ()))
        for again in self.coming.repeats:
            if again.first.tensor == tensor:
                yield from twice(again.box, self._view(again.first, again.box), self._view(again.second, again.box))

    def _view(self, one: ParamLayout, box: Box) -> Tensor:
        return self._params[one.param][one.param_box(box).slices]


def table(model: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every parameter of a model, by its own name."""
    return {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters()}


def own_params(model: torch.nn.Module) -> dict[str, Tensor]:
    """A model's parameters as the layout sees them: views in which those of three dims are `folded`.

    Raises:
        WeightSyncError: One cannot be seen so without a copy.
    """
    found = {}
    for name, param in model.named_parameters():
        if param.dim() > 2 and not param.is_contiguous():
            raise WeightSyncError(
                f"weight update: {name} {tuple(param.shape)} has strides {param.stride()}; needs a contiguous block an "
                "expert; choose another moe_runner_backend"
            )
        found[name] = param.detach().view(folded(tuple(param.shape)))
    return found


def check_unpacked(model: torch.nn.Module) -> None:
    """Raise WeightSyncError if a module of the model keeps its weights in another order than its checkpoint does."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        repacks = [
            flag
            for holder in (module, method)
            for flag in ("use_intel_amx_backend", "w13_swiglu_interleaved", "use_triton_kernels")
            if holder is not None and getattr(holder, flag, False)
        ]
        if getattr(sys.modules.get(type(method).__module__), "_use_aiter", False):
            repacks.append("aiter")
        if method is not None and "Unquantized" not in type(method).__name__:
            repacks.append(type(method).__name__)
        if repacks:
            raise WeightSyncError(
                f"weight update: {name} keeps its weights repacked ({', '.join(repacks)}); needs them as the "
                "checkpoint has them; start the engine without AMX, quantisation, aiter, trtllm and interleaved experts"
            )


def check_held(coming: Coming, params: Mapping[str, Tensor]) -> None:
    """Raise WeightSyncError unless every block that a rank says it holds lies inside a parameter of its dtype."""
    for ones in coming.held.values():
        for one in ones:
            param, place = params.get(one.param), one.param_box(one.box)
            if param is None:
                raise WeightSyncError(
                    f"weight update: the engine has no parameter {one.param}, which should hold {one.tensor}; needs "
                    "the model that the layout describes"
                )
            fits = param.dim() == len(place.spans) and all(
                stop <= extent for (_, stop), extent in zip(place.spans, param.shape, strict=True)
            )
            if not fits:
                raise WeightSyncError(
                    f"weight update: the engine's {one.param} has shape {tuple(param.shape)}; needs room for "
                    f"{one.tensor} at {place.spans}; start it with the sizes of the layout"
                )
            if str(param.dtype).removeprefix("torch.") != coming.dtype:
                raise WeightSyncError(
                    f"weight update: the engine's {one.param} is {param.dtype}; {coming.dtype} arrives, and nothing is "
                    "cast; start the engine with the dtype of the actor"
                )
    _check_whole(coming, params)


def check_covered(coming: Coming) -> None:
    """Raise WeightSyncError unless a complete transfer fills every held element exactly once."""
    landed: dict[str, list[Box]] = {}
    for landing in (landing for window in coming.windows for landing in window):
        landed.setdefault(landing.one.tensor, []).append(landing.box)
    for tensor, ones in coming.held.items():
        filled, wanted = landed.get(tensor, []), [one.box for one in ones]
        cells = Cells([*filled, *wanted])
        counted, needed = cells.count(filled), cells.count(wanted) > 0
        if (counted != needed).any():
            short = cells.elements(needed & (counted == 0))
            raise WeightSyncError(
                f"weight update: {short} elements of {tensor}, held in {ones[0].param}, do not come, or others come "
                "twice, in what should be a complete transfer; needs each once; both ends must have the same layouts"
            )


def _check_whole(coming: Coming, params: Mapping[str, Tensor]) -> None:
    """Every element of every parameter is held as part of some tensor, once, or is padding that the layout names."""
    places: dict[str, list[Box]] = {}
    for one in (one for ones in coming.held.values() for one in ones):
        places.setdefault(one.param, []).append(one.param_box(one.box))
    for name, param in params.items():
        held, padding = places.get(name, []), coming.padding.get(name, 0)
        whole = Box(tuple((0, extent) for extent in param.shape))
        cells = Cells([whole, *held])
        counted = cells.count(held)
        missing = prod(param.shape) - cells.elements(counted > 0)
        if missing != padding or counted.max(initial=0) > 1:
            raise WeightSyncError(
                f"weight update: {missing} elements of the engine's {name} {tuple(param.shape)} belong to no tensor, "
                f"or some to two; needs {padding}, its padding; the layout does not describe this model"
            )


def _settle(region: Tensor) -> None:
    """Copies from a region of device memory are done when this returns. Never run on a device."""
    if region.is_cuda:
        torch.cuda.current_stream(region.device).synchronize()
