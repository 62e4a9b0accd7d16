"""Steps as CUDA graphs: a small network's step is a thousand short kernels, and launching them one by one from Python
takes longer than running them."""

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

Speed = Literal["eager", "graph", "blocks", "full"]
COMPILING: tuple[Speed, ...] = ("blocks", "full")
TOLD = "compiling the network: up to a minute at first, less in later runs, since torch keeps what it compiled"
WORTH_TELLING = 1.0  # seconds
KEEPS_OWN = "autograd_cache_allow_custom_autograd_functions"
# Kinds of steps that one process may compile; torch stops at 8, which a grid of runs passes.
NETWORKS = 128


class Replay:
    """`function` of tensors, recorded as a CUDA graph at its first call and replayed for inputs of the same shapes.

    The function must not look at its inputs' values on the host, and running it twice must do no harm (it is run to
    warm up). What it returns is overwritten by the next call. Other shapes, a CPU and functions that cannot be
    recorded are run as they are. `say` tells how long the first call took, compilation included.
    """

    def __init__(self, function: Callable[..., Any], on: bool = True, say: Callable[[str], None] | None = None) -> None:
        self.function, self.on, self.say = function, on, say
        self.seconds: float | None = None  # of the first call
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.output: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        if self.seconds is not None or not self.on:
            return self._call(*inputs)
        began = time.perf_counter()
        result = self._call(*inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - began
        if self.say and self.seconds > WORTH_TELLING:
            self.say(f"the training step was ready after {self.seconds:.1f} s")
        return result

    def _call(self, *inputs: Tensor) -> Any:
        if not self.on or not inputs[0].is_cuda:
            return self.function(*inputs)
        if self.graph is None and not self._record(inputs):
            return self.function(*inputs)
        if any(mine.shape != given.shape for mine, given in zip(self.inputs, inputs, strict=True)):
            return self.function(*inputs)
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        assert self.graph is not None
        self.graph.replay()
        return self.output

    def _record(self, inputs: tuple[Tensor, ...]) -> bool:
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=side):
                self.output = self.function(*self.inputs)
        except RuntimeError as error:
            warnings.warn(
                f"this step cannot be recorded as a CUDA graph and runs as it is, slower: {str(error).splitlines()[0]}",
                stacklevel=3,
            )
            self.on = False
            return False
        self.graph = graph
        return True


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """The one that steps are recorded on: cuBLAS keeps a workspace of 32 MiB for every stream it was ever used on."""
    return torch.cuda.Stream(device)


def compiled(function: Callable[..., Tensor], speed: Speed, model: nn.Module) -> Callable[..., Tensor]:
    """`function`, which runs `model`, through torch.compile where `speed` asks for it.

    With `full` in one piece, which is the fastest; with `blocks`, blocks that repeat are compiled once for all of them, which is sooner
    ready. What cannot be compiled runs as it is, with a warning.
    """
    if speed not in COMPILING:
        return function
    torch._dynamo.config.recompile_limit = NETWORKS
    cache = torch._functorch.config
    if hasattr(cache, KEEPS_OWN):  # or nothing that a stack's own functions are part of would be kept
        setattr(cache, KEEPS_OWN, True)
    around = _compiled(function)
    # The compiler of what is around a block stops at it, and the block is a function of its own to compile.
    forwards = {
        block: torch.compiler.disable(_compiled(block.forward))
        for block in (repeated(model) if speed == "blocks" else ())
    }

    def call(*inputs: Tensor) -> Tensor:
        for block, forward in forwards.items():
            block.forward = forward
        try:
            return around(*inputs)
        finally:
            for block in forwards:
                del block.forward  # the class's own shows again

    return call


def repeated(model: nn.Module) -> list[nn.Module]:
    """Blocks of which a network has a row of four or more, of one class and with weights of the same shapes."""
    found, inside = list[nn.Module](), set[nn.Module]()
    for module in model.modules():  # rows before what is inside their blocks
        row = list(module.children()) if isinstance(module, (nn.Sequential, nn.ModuleList)) else []
        kinds = {(type(block), *((name, w.shape) for name, w in block.named_parameters())) for block in row}
        if len(row) >= 4 and len(kinds) == 1 and not inside.intersection(row):
            found += row
            inside.update(*(block.modules() for block in row))
    return found


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    chosen: Callable[..., Tensor] = torch.compile(function, dynamic=False)
    tried = False

    def call(*inputs: Tensor) -> Tensor:
        nonlocal chosen, tried
        try:
            return chosen(*inputs)
        except Exception as error:  # compilers fail in their own ways
            if tried:
                raise
            first = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            warnings.warn(
                f"torch.compile cannot take this network, which runs without it, slower: {first}", stacklevel=2
            )
            chosen = function
            return function(*inputs)
        finally:
            tried = True

    return call
