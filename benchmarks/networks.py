"""Which networks the stacked executor takes and how, whether they train as `sequential` trains them, and how fast."""

import copy
import gc
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.options import option, words
from benchmarks.result import Cell, Result, alternate, columns, keeping, say, shown
from fedsieve.config import Correction, Data, Local, Model, Optimizer
from fedsieve.data.store import ImageStore
from fedsieve.data.transforms import HALF, make_transform
from fedsieve.errors import FedsieveError
from fedsieve.federation.executors import Cohort, Executor, Sequential, Task, stacked
from fedsieve.federation.work import Draws, local_work
from fedsieve.model.build import build_classifier
from fedsieve.model.scheme import WAYS
from fedsieve.model.space import ParamSpace
from fedsieve.train.feed import Feed

CLASSES, CLIENTS, IMAGES, STEPS = 5, 3, 4, 1
PIXELS = (64, 128, 224, 240, 256)  # the first that a network takes
LARGE = 20_000_000  # weights: such a network is shortened, if its family's options allow
EQUAL = 1e-3  # of an update, in float32
LARGEST = 100_000_000  # weights: more would not fit into a small machine's memory in float64
SOURCES = ("timm", "torchvision", "transformers")
HOW = {
    "rules": "stacked",
    "layers": "stacked, layers mapped",
    "around": "stacked, blocks mapped",
    "whole": "general",
    "": "one by one",
}
SMOKE = ("starnet", "mambaout")
TORCHVISION = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_y_400mf",
    "resnet18",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_0",
    "swin_t",
    "swin_v2_t",
    "vgg11",
    "vit_b_16",
    "wide_resnet50_2",
]
_VIT = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96, "image_size": 64}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "ViT": _VIT,
    "DeiT": _VIT,
    "Beit": {**_VIT, "use_relative_position_bias": True},
    "Dinov2": {**_VIT, "patch_size": 16},
    "Swin": {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "image_size": 64, "window_size": 4},
    "ConvNext": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]},
    "ConvNextV2": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]},
    "ResNet": {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 96, 128], "embedding_size": 16},
    "PoolFormer": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]},
    "Segformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 40, 64]},
}


@dataclass(frozen=True)
class Member:
    """A network of a family, and how to build it for images of a size."""

    source: str
    family: str
    name: str
    build: Callable[[int], nn.Module]


class Logits(nn.Module):
    """A network of transformers that gives its logits alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return self.net(pixel_values=images).logits


def networks(
    device: torch.device,
    smoke: bool,
    sources: Annotated[Sequence[str], words("`timm`, `torchvision`, `transformers`.", SOURCES)] = SOURCES,
    families: Annotated[str | None, option(str, "Families of timm, such as resnet,swin_transformer.")] = None,
    seconds: Annotated[float, option(float, "When no further turn of a network begins.", min=0)] = 4.0,
) -> Result:
    """The smallest member of every timm family, and the main classifiers of torchvision and transformers."""
    result = Result(
        columns(
            "source | family | network | pixels | weights, M | how | why not by rules alone | equal | off by | "
            "sequential, ms | times sequential"
        ),
        note=f"{CLIENTS} clients, {STEPS} step of {IMAGES} images, all weights train, fp32, eager. Every way is tried, also those that a run "
        f"takes on a GPU only. `equal`: outputs and gradients agree in float64, and updates to {EQUAL:g} of their norm (`off by`). "
        "`times sequential`: medians of common turns; above 1 the stacked executor is faster. Of a family whose smallest "
        f"network has more than {LARGE // 10**6} M weights, it has two blocks, or two a stage, where its options allow it.",
    )
    only = SMOKE if smoke else families.split(",") if families else ()
    chosen = ("timm",) if smoke else tuple(sources)
    with keeping(result):
        for member in _members(chosen, only):
            try:
                with warnings.catch_warnings(action="ignore"):
                    row = _row(member, device, 0.0 if smoke else seconds)
            except Exception as error:  # networks fail in their own ways
                result.skipped.append(f"{member.source} {member.family}: {_first_line(error)}")
                say(result.skipped[-1])
                continue
            say(" | ".join(map(shown, row)))
            result.rows.append(row)
            gc.collect()  # a stack and its modules' forward passes hold each other
    return result


def _row(member: Member, device: torch.device, seconds: float) -> tuple[Cell, ...]:
    net, pixels = _built(member)
    weights = sum(parameter.numel() for parameter in net.parameters())
    if weights > LARGEST:
        raise FedsieveError(f"{member.name} has {weights / 1e6:.0f} M weights. At most {LARGEST // 10**6} M are tried")
    plain, cohort = _sequential(copy.deepcopy(net), pixels, device)
    own, _ = _sequential(net, pixels, device)
    how, faults = "", list[str]()
    executor: Executor = own
    for way in WAYS:
        try:
            executor, how = stacked(own.task, None, CLIENTS, IMAGES, lambda _: None, [way]), way
            break
        except FedsieveError as error:
            faults.append(str(error))
    why = faults[0] if faults else ""
    if not how:
        return (
            member.source,
            member.family,
            member.name,
            pixels,
            weights / 1e6,
            HOW[how],
            faults[-1],
            "",
            None,
            None,
            None,
        )
    moved = [_train(each, cohort) for each in (executor, plain)]
    off = float((moved[0] - moved[1]).norm() / moved[1].norm())
    calls = {"stacked": partial(_train, executor, cohort), "sequential": partial(_train, plain, cohort)}
    taken = alternate(calls, device, 7, seconds, warm=True)
    times = off, 1e3 * taken["sequential"], taken["sequential"] / taken["stacked"]
    equal = "yes" if off <= EQUAL else "no"
    return member.source, member.family, member.name, pixels, weights / 1e6, HOW[how], why, equal, *times


def _sequential(net: nn.Module, pixels: int, device: torch.device) -> tuple[Sequential, Cohort]:
    """The plain executor of a network, and a cohort to train."""
    rng = np.random.default_rng(0)
    count = CLIENTS * IMAGES
    images = torch.from_numpy(rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, CLASSES, count)).to(device)
    transform = make_transform(Data(source="digits", size=pixels), *HALF)
    feed = Feed(ImageStore(images, device), transform, np.arange(count), labels)
    space = ParamSpace.of(net.to(device))
    theta = space.bind(net)
    task = Task(net, space, theta, feed, Optimizer(lr=1e-3), Correction(), nullcontext)
    draws = Draws(feed, 0, ("bench", 0))
    parts = (range(client * IMAGES, (client + 1) * IMAGES) for client in range(CLIENTS))
    works = [local_work(number, np.array(part), Local(steps=STEPS), IMAGES, draws) for number, part in enumerate(parts)]
    return Sequential(task, None), Cohort(works, theta.detach().clone())


def _train(executor: Executor, cohort: Cohort) -> Tensor:
    return torch.cat([result.moved for result in executor.train(cohort, 1e-3)])


def _built(member: Member) -> tuple[nn.Module, int]:
    """The network, ready to train, for the smallest images that it takes."""
    fault: Exception | None = None
    for pixels in PIXELS:
        try:
            net = member.build(pixels).eval()
            with torch.no_grad():
                net(torch.zeros(2, 3, pixels, pixels))
            return net, pixels
        except Exception as error:  # networks fail in their own ways
            fault = error
    assert fault is not None
    raise fault


def _members(sources: Sequence[str], only: Sequence[str]) -> Iterator[Member]:
    if "timm" in sources:
        yield from _timm(only)
    if "torchvision" in sources:
        from torchvision.models import get_model

        for name in TORCHVISION:
            more = {"image_size": 64} if name == "vit_b_16" else {"init_weights": False} if "ception" in name else {}
            make = partial(get_model, name, weights=None, num_classes=CLASSES, **more)
            yield Member("torchvision", name, name, _whatever(make))
    if "transformers" in sources:
        try:
            import transformers
        except ImportError:
            say("transformers cannot be imported: its networks are left out")
            return
        for name, options in TRANSFORMERS.items():
            config = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **options)
            kind = getattr(transformers, f"{name}ForImageClassification")
            yield Member("transformers", name, name, _whatever(partial(_logits, kind, config)))


def _whatever(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Builds a network that takes images of all sizes, or of a configured one."""
    return lambda pixels: make()


def _logits(kind: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    return Logits(kind(config))


def _timm(only: Sequence[str]) -> Iterator[Member]:
    """The smallest member of every family: timm's networks in one module of its source."""
    import timm

    families = defaultdict(list)
    for name in timm.list_models():
        families[timm.model_entrypoint(name).__module__.rpartition(".")[2]].append(name)
    for family, names in sorted(families.items()):
        if not only or family in only:
            name, weights = min(((name, _weights(name)) for name in names), key=lambda pair: pair[1])
            yield Member("timm", family, name, partial(_timm_classifier, name, weights > LARGE))


def _weights(name: str) -> float:
    """The number of a network's weights, without drawing them."""
    import timm

    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            return sum(parameter.numel() for parameter in timm.create_model(name, num_classes=0).parameters())
    except Exception:  # some cannot be built without values
        return float("inf")


def _timm_classifier(name: str, large: bool, pixels: int) -> nn.Module:
    shorter: list[dict[str, Any]] = [{"depth": 2}, {"depths": (2, 2, 2, 2)}] if large else []
    for options in [*shorter, {}]:
        try:
            return build_classifier(Model(backbone=name, weights="none", options=options), CLASSES, pixels, 0)
        except FedsieveError:
            if not options:
                raise
    raise AssertionError


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
