"""The shape of the code in numbers: how much one must read to follow a round, and what is too large.

uv run python -m benchmarks.codebase [--functions]

The path of a round is traced: one dense FedAvg round of three clients in this process. It counts the lines of all functions
that run, and the files they are in. The federation's own share shows the structure; the rest is what it calls.
"""

import argparse
import ast
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import fedsieve

PACKAGE = Path(fedsieve.__file__).parent
ROUND = """
name: path
device: cpu
data: {source: digits, size: 8, normalize: half, val_fraction: 0.2}
model: {backbone: vit_tiny_patch16_224, options: {patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}, weights: none}
federation: {clients: 8, cohort: 3, partition: {kind: iid}}
stages: [{name: all, train: all, rounds: 2, local: {steps: 2}, batch_size: 16, optimizer: {lr: 0.1}}]
tracking: []
"""
DOCUMENTED = {"os._exit"}  # names with an underscore that are not private
MANY = 6  # parameters

Called = set[tuple[str, int]]  # file and first line of each function


def modules() -> Iterator[tuple[str, ast.Module, int]]:
    """Each module of the package: its name, its syntax tree, and its lines."""
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        yield file.relative_to(PACKAGE).as_posix(), ast.parse(text), text.count("\n")


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a module."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def largest_class() -> tuple[int, str]:
    """Its lines and its name."""
    return max(
        ((node.end_lineno or 0) - node.lineno + 1, f"{node.name} ({name})")
        for name, tree, _ in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )


def largest_module() -> tuple[int, str]:
    """Its lines and its name."""
    return max((lines, name) for name, _, lines in modules())


def long_parameter_lists() -> list[str]:
    """Functions with more than six parameters, `self` and the command line's own excepted."""
    found = []
    for name, tree, _ in modules():
        for function in functions(tree) if not name.startswith("cli/") else ():
            given = function.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            count = sum(one is not None and one.arg not in ("self", "cls") for one in every)
            if count > MANY:
                found.append(f"{name}:{function.lineno} {function.name} ({count})")
    return found


def private_uses() -> list[str]:
    """Uses of another object's private members, and of another module's private names."""
    found = []
    for name, tree, _ in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if not own and node.attr != "_replace" and ast.unparse(node) not in DOCUMENTED:
                    found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedsieve"):
                found += [f"{name}:{node.lineno} {one.name}" for one in node.names if one.name.startswith("_")]
    return found


def traced_round() -> tuple[Called, Called]:
    """The functions of the package that run when a dense stage is made, and those that run in one of its rounds."""
    from fedsieve.config import parse_config
    from fedsieve.runner.federated import make_context
    from fedsieve.runner.prepare import prepare
    from fedsieve.runner.progress import Display
    from fedsieve.runner.stages import FederatedStage, Venue

    before, during = Called(), Called()
    into = before

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            into.add((code.co_filename, code.co_firstlineno))

    experiment = parse_config(ROUND)
    setup = prepare(experiment, Display.silent())
    initial = {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        context = make_context(setup, initial, Path(folder), "", {})
        profile = sys.getprofile()
        sys.setprofile(note)
        try:
            ticks = FederatedStage(setup, Venue(Path(folder), context), experiment.stages[0]).ticks()
            into = during
            next(ticks)
        finally:
            sys.setprofile(profile)
        context.ledger.close()
    return before - during, during


def lines_of(called: Called) -> dict[str, int]:
    """Lines of the functions that were called, by module, the longest first."""
    found: dict[str, int] = {}
    for name, tree, _ in modules():
        starts = {line for file, line in called if file == str(PACKAGE / name)}
        inside: set[int] = set()
        for function in functions(tree):
            first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
            if {first, function.lineno} & starts:
                inside |= set(range(first, (function.end_lineno or 0) + 1))
        if inside:
            found[name] = len(inside)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def federation(lines: dict[str, int]) -> dict[str, int]:
    """The federation's own share."""
    return {name: count for name, count in lines.items() if name.startswith("federation/")}


def main() -> None:
    """Print all numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="also list what was found")
    listed = parser.parse_args().functions
    before, during = (lines_of(called) for called in traced_round())
    for what, lines in (("one round", during), ("before it", before)):
        own = federation(lines)
        print(f"{what}: {len(own)} files, {sum(own.values()):,} lines of federation; ", end="")
        print(f"{len(lines)} files, {sum(lines.values()):,} lines in all")
        if listed:
            print(*(f"  {count:>5} {name}" for name, count in lines.items()), sep="\n")
    for what, (size, where) in (("class", largest_class()), ("module", largest_module())):
        print(f"largest {what}: {size} lines, {where}")
    print(f"lines in src/fedsieve: {sum(lines for _, _, lines in modules()):,}")
    for what, found in (
        (f"functions with more than {MANY} parameters", long_parameter_lists()),
        ("uses of another object's private members", private_uses()),
    ):
        print(f"{what}: {len(found)}")
        if listed:
            print(*(f"  {one}" for one in found), sep="\n")


if __name__ == "__main__":
    main()
