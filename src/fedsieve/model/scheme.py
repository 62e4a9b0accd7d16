"""Which modules of a network are stacked by rules, and which are mapped over clients as they are."""

from collections.abc import Collection
from typing import Literal

from torch import nn

from fedsieve.errors import FedsieveError
from fedsieve.model.layers import rules, token_scales

# How far above a layer without a rule the module begins that is mapped: nowhere (such a layer is refused), at the layer, at the
# module around it, at the network.
Way = Literal["rules", "layers", "around", "whole"]
WAYS: tuple[Way, ...] = ("rules", "layers", "around", "whole")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Scheme:
    """How the modules that own the `wanted` parameters of a model are taken in one of the ways.

    `strange` are those without a rule, with reasons; `regions` are the outermost modules that are mapped. Both hold paths.
    """

    def __init__(self, model: nn.Module, wanted: Collection[str], way: Way) -> None:
        self.model, self.wanted, self.way = model, wanted, way
        self.homes = {parameter: name for name, parameter in model.named_parameters()}  # of tied ones, the first name
        self.strange = self._strange()
        self.regions = self._regions()

    def own(self, module: nn.Module) -> dict[str, str]:
        """The names in the model of the module's own parameters, by their names in the module."""
        return {name: self.homes[parameter] for name, parameter in module.named_parameters(recurse=False)}

    def _strange(self) -> dict[str, str]:
        """The modules that cannot be stacked by a rule, and why; of those that own parameters of the scheme."""
        found = {}
        for path, module in self.model.named_modules():
            names = self.own(module)
            mine = [name for name in names.values() if name in self.wanted]
            if mine and (reason := self._reason(module, names.keys(), mine)):
                found[path] = f"{path or 'it'} ({type(module).__name__}) {reason}"
        if found and self.way == "rules":
            raise FedsieveError(next(iter(found.values())))
        return found

    def _reason(self, module: nn.Module, names: Collection[str], mine: list[str]) -> str:
        """Why no rule stacks the module; empty if one does."""
        rule = rules().get(type(module))
        if rule is None and isinstance(module, tuple(rules())):
            return "is no layer that stacking knows"
        if rule is not None:
            if set(names) - {"bias"} != rule.needs:
                return f"has {', '.join(names)} instead of a weight and a bias"
            if "forward" in vars(module) or any(getattr(module, hooks) for hooks in HOOKS):
                return "has a hook or a forward pass of its own"
            return rule.refuse(module)
        # Bare parameters are swapped for one per image. That is right for tokens and, among tokens, for layer scales; where
        # another way is open, only for those of known kinds.
        for name in mine:
            shape = self.model.get_parameter(name).shape
            token = len(shape) > 2 and shape[0] == 1
            scale = len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)
            if not token and not (scale and (self.way == "rules" or type(module) in token_scales())):
                return f"has {name.rpartition('.')[2]} of shape {tuple(shape)}, which cannot be stacked"
        return ""

    def _regions(self) -> list[str]:
        """The outermost modules that are mapped."""
        if self.way == "whole":
            return [""]
        starts = set()
        for path in self.strange:
            start = path.rpartition(".")[0] if self.way == "around" else path
            while isinstance(self.model.get_submodule(start), (nn.ModuleList, nn.ModuleDict, nn.ParameterList)):
                start = start.rpartition(".")[0]  # they hold modules, and are not called
            starts.add(start)
        return [start for start in starts if not any(_inside(start, other) for other in starts - {start})]

    def region(self, path: str) -> str | None:
        """The mapped module that a module is in, or is."""
        return next((region for region in self.regions if _inside(path, region)), None)

    def mapping(self) -> str:
        """Says what is mapped, and what to do about it."""
        kinds = {type(self.model.get_submodule(region)).__name__ for region in self.regions}
        what = "The whole network" if "" in self.regions else f"What has no rule ({', '.join(sorted(kinds))})"
        return f"{what} runs through torch.vmap, which gives the same and may be slower. docs/design.md names the layers with rules"

    def within(self, module: nn.Module) -> dict[str, str]:
        """The wanted parameters in a module, by all of their names in it, but once for a module in two places."""
        return {
            f"{path}.{name}".lstrip("."): home
            for path, inner in module.named_modules()
            for name, home in self.own(inner).items()
            if home in self.wanted
        }


def _inside(path: str, region: str) -> bool:
    return not region or path == region or path.startswith(f"{region}.")
