"""`fedsieve mask`: where masks are, and what they share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedsieve.cli.root import app, console, percent
from fedsieve.errors import FedsieveError

if TYPE_CHECKING:
    from fedsieve.mask.mask import Mask

mask_app = typer.Typer(
    no_args_is_help=True, help="Look at masks: which weights of a model may train.", rich_markup_mode="markdown"
)
app.add_typer(mask_app, name="mask")
Page = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Also write a page with pictures.", show_default=False),
]


@mask_app.command("show")
def mask_show(
    file: Annotated[Path, typer.Argument(metavar="MASK", help="A mask file, such as RUN/masks/STAGE.safetensors.")],
    out: Page = None,
) -> None:
    """Where a mask's active weights are, block by block."""
    from fedsieve.report.masks import mask_rows, write_mask_page

    mask = _load_mask(file)
    table = Table(title=f"{file.stem}, id {mask.id}", title_justify="left")
    table.add_column("block")
    for column in ("tensors", "weights", "active", "share", "emptied", "frozen"):
        table.add_column(column, justify="right")
    for row in mask_rows(mask):
        values = (row.tensors, row.weights, row.active)
        table.add_row(row.block, *(f"{v:,}" for v in values), percent(row.share), str(row.emptied), str(row.frozen))
    console.print(table)
    console.print(f"{mask.count:,} of {mask.space.size:,} weights active ({percent(mask.density)})", highlight=False)
    if out is not None:
        console.print(f"page: {write_mask_page({file.stem: mask}, out)}", highlight=False, soft_wrap=True)


@mask_app.command("diff")
def mask_diff(
    files: Annotated[list[Path], typer.Argument(metavar="MASK MASK...", help="Two masks, or more for a page.")],
    out: Page = None,
) -> None:
    """What masks share: block by block for two, with the overlap that chance would give; pictures for any number."""
    from fedsieve.mask.overlap import jaccard
    from fedsieve.report.masks import diff_rows, write_mask_page

    if len(files) < 2 or (len(files) > 2 and out is None):
        raise FedsieveError("mask diff: name two masks, or more together with --out FILE for a page")
    masks = {str(file): _load_mask(file) for file in files}
    if len(files) == 2:
        one, two = masks.values() if len(masks) == 2 else 2 * list(masks.values())
        try:
            one.check(two.space)
        except FedsieveError as error:
            raise FedsieveError(f"{files[0]} and {files[1]} cannot be compared: {error}") from None
        table = Table(title=f"{files[0]} against {files[1]}", title_justify="left")
        table.add_column("block")
        for column in ("in both", "only the first", "only the second", "Jaccard", "by chance"):
            table.add_column(column, justify="right")
        for row in diff_rows(one, two):
            shares = ("-" if value != value else f"{value:.3f}" for value in (row.jaccard, row.chance))
            table.add_row(row.block, f"{row.both:,}", f"{row.only_a:,}", f"{row.only_b:,}", *shares)
        console.print(table)
        same = "equal masks" if one == two else f"Jaccard {jaccard(one, two):.3f} over all weights"
        console.print(same, highlight=False)
    if out is not None:
        console.print(f"page: {write_mask_page(masks, out)}", highlight=False, soft_wrap=True)


def _load_mask(file: Path) -> "Mask":
    from fedsieve.mask.mask import Mask

    if file.is_dir():
        inside = sorted([*file.glob("masks/*.safetensors"), *file.glob("*.safetensors")])
        found = f"Masks in it: {', '.join(map(str, inside))}" if inside else "No mask is in it"
        raise FedsieveError(f"{file}: a folder, not a mask file. {found}")
    return Mask.load(file)
