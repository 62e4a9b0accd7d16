import json
import re
from itertools import combinations

import numpy as np
import pytest
import torch

from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.mask.overlap import block_of, expected_jaccard
from fedsieve.model.space import ParamSpace
from fedsieve.report.masks import (
    allocation_figures,
    diff_rows,
    held,
    holders_by_chance,
    mask_rows,
    pair_map,
    pairs,
    tensor_rows,
    write_mask_page,
)
from fedsieve.report.page import write_report


def space_of(depth=3, width=5):
    """A small transformer's names; widths that leave tensors off the borders of bytes."""
    shapes = {"backbone.cls_token": (1, 1, width), "backbone.patch_embed.proj.weight": (width, 3, 2, 2)}
    for block in range(depth):
        prefix = f"backbone.blocks.{block}"
        shapes |= {f"{prefix}.norm1.weight": (width,), f"{prefix}.attn.qkv.weight": (3 * width, width)}
        shapes |= {f"{prefix}.mlp.fc1.weight": (4 * width, width), f"{prefix}.mlp.fc1.bias": (4 * width,)}
    shapes |= {"backbone.norm.weight": (width,), "head.weight": (7, width), "head.bias": (7,)}
    return ParamSpace(tuple(shapes), tuple(shapes.values()))


SPACE = space_of()


def drawn(seed, density=0.3, space=SPACE):
    return Mask.from_bool(space, torch.rand(space.size, generator=torch.Generator().manual_seed(seed)) < density)


def with_counts(counts, space=SPACE):
    """The mask with the first so many weights of each named tensor, and all of the others."""
    active = torch.ones(space.size, dtype=torch.bool)
    for name, count in counts.items():
        space.view(active, name).view(-1)[count:] = False
    return Mask.from_bool(space, active)


def sets(mask):
    """The active weights as a set of (tensor, place): the slow reference."""
    return {(name, i) for name in mask.space.names for i in np.flatnonzero(mask.tensor(name).numpy().ravel())}


def jaccard_of(a, b):
    return len(a & b) / len(a | b) if a | b else float("nan")


def test_the_rows_of_a_mask_count_what_its_blocks_hold():
    mask = drawn(0)
    rows = mask_rows(mask)
    assert [row.block for row in rows] == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    active = sets(mask)
    for row in rows:
        names = [name for name in SPACE.names if block_of(name) == row.block]
        assert row.tensors == len(names)
        assert row.weights == sum(mask.tensor(name).numel() for name in names)
        assert row.active == len([1 for name, _ in active if name in names])
        assert row.share == row.active / row.weights
    assert sum(row.active for row in rows) == mask.count and sum(row.weights for row in rows) == SPACE.size


def test_tensors_emptied_but_for_the_floor_are_told_from_frozen_and_full_ones():
    space = ParamSpace((*SPACE.names, "head.scale"), (*SPACE.shapes, (1,)))
    mask = with_counts({"backbone.cls_token": 0, "head.bias": 1, "head.weight": 4}, space)
    states = {row.name: row.state for row in tensor_rows(mask)}
    assert states["backbone.cls_token"] == "frozen"
    assert states["head.bias"] == "emptied"
    assert states["head.scale"] == "active"  # one weight of one: nothing was taken from it
    assert states["head.weight"] == "active"
    assert {row.name: row.state for row in tensor_rows(mask, floor=4)}["head.weight"] == "emptied"
    head = mask_rows(mask)[-1]
    assert (head.emptied, head.frozen) == (1, 0) and mask_rows(mask)[0].frozen == 1


def test_the_rows_of_a_difference_are_those_of_sets():
    a, b = drawn(1), drawn(2, 0.6)
    for row in diff_rows(a, b):
        own = [{weight for weight in sets(mask) if block_of(weight[0]) == row.block} for mask in (a, b)]
        assert (row.both, row.only_a, row.only_b) == (len(own[0] & own[1]), len(own[0] - own[1]), len(own[1] - own[0]))
        assert row.jaccard == pytest.approx(jaccard_of(*own), nan_ok=True)
        size = next(other.weights for other in mask_rows(a) if other.block == row.block)
        assert row.chance == expected_jaccard(len(own[0]) / size, len(own[1]) / size)


def test_a_block_that_both_masks_freeze_has_no_jaccard_index():
    a = b = with_counts({"backbone.norm.weight": 0})
    row = next(row for row in diff_rows(a, b) if row.block == "norm")
    assert (row.both, row.only_a, row.only_b) == (0, 0, 0) and np.isnan(row.jaccard) and np.isnan(row.chance)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_holders_are_counted_as_sets_would_be(count):
    masks = [drawn(seed, 0.1 + 0.15 * seed) for seed in range(count)]
    counted, own = held(masks), [sets(mask) for mask in masks]
    for index, name in enumerate(SPACE.names):
        holders = [sum((name, i) in each for each in own) for i in range(masks[0].tensor(name).numel())]
        assert counted.exactly[index].tolist() == [holders.count(j) for j in range(count + 1)]
        for number, each in enumerate(own):
            others = set().union(*own[:number], *own[number + 1 :])
            assert counted.only[index, number] == len([1 for weight in each - others if weight[0] == name])
    assert counted.exactly.sum() == SPACE.size


def test_pairs_are_those_of_sets_and_chance_is_that_of_the_densities():
    masks = [drawn(seed, 0.2 + 0.1 * seed) for seed in range(4)] + [with_counts({"head.bias": 0})]
    found, own = pairs(masks), [sets(mask) for mask in masks]
    for m, (i, j) in enumerate(combinations(range(5), 2)):
        assert found.total[m] == pytest.approx(jaccard_of(own[i], own[j]))
        assert found.chance[m] == pytest.approx(expected_jaccard(masks[i].density, masks[j].density))
        both = either = 0.0
        for t, (name, rows) in enumerate(zip(SPACE.names, zip(*map(tensor_rows, masks), strict=True), strict=True)):
            parts = [{weight for weight in each if weight[0] == name} for each in (own[i], own[j])]
            assert found.tensors[t, m] == pytest.approx(jaccard_of(*parts), nan_ok=True)
            p, q, n = rows[i].share, rows[j].share, rows[i].weights
            assert found.tensors_chance[t, m] == pytest.approx(expected_jaccard(p, q), nan_ok=True)
            both, either = both + n * p * q, either + n * (p + q - p * q)
        assert found.allocated[m] == pytest.approx(both / either)
        assert found.blocks[:, m] == pytest.approx([row.jaccard for row in diff_rows(masks[i], masks[j])], nan_ok=True)


def test_chance_is_what_random_masks_come_to():
    space = ParamSpace(("w",), ((200_000,),))
    masks = [drawn(seed, density, space) for seed, density in enumerate([0.1, 0.3, 0.5])]
    shares = held(masks).exactly.sum(0) / space.size
    assert shares == pytest.approx(holders_by_chance([0.1, 0.3, 0.5]), abs=0.005)
    assert pairs(masks).total == pytest.approx(pairs(masks).chance, abs=0.005)


def test_the_page_of_one_mask_shows_its_allocation_and_what_it_emptied(tmp_path):
    mask = with_counts({"backbone.cls_token": 0, "head.bias": 1, "backbone.norm.weight": 1})
    page = write_mask_page({"<b>mine</b>": mask}, tmp_path)
    assert page == tmp_path / "masks.html"
    text = page.read_text(encoding="utf-8")
    assert "&lt;b&gt;mine&lt;/b&gt;" in text and "<b>mine</b>" not in text
    assert f"{mask.count:,}" in text and mask.id[:12] in text
    assert f"2 of {len(SPACE.names)} tensors</strong> are emptied but for the floor" in text
    assert "emptied but for the floor: 2 tensors" in text and "wholly frozen: 1 tensor<" in text  # in the figure too
    assert "backbone.blocks.1.mlp.fc1.weight" in text
    assert "Jaccard" not in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text) and "url(http" not in text


def test_the_page_of_two_masks_says_where_they_differ(tmp_path):
    a, b = drawn(1), drawn(2, 0.6)
    text = write_mask_page({"first": a, "second": b}, tmp_path / "page.html").read_text()
    assert "only first" in text and "only second" in text
    found = jaccard_of(sets(a), sets(b))
    assert f'class="big">{found:.3f}<' in text
    for row in diff_rows(a, b):
        assert re.search(
            rf">{re.escape(row.block)}</th>.*?>{row.both}</td>.*?>{row.only_a}</td>.*?>{row.only_b}</td>", text
        )
    assert "equal, bit for bit" not in text


def test_the_page_of_five_masks_has_all_pairs_and_names_the_equal_ones(tmp_path):
    masks = {f"client {number}": drawn(number) for number in range(4)}
    masks["twin"] = masks["client 2"]
    text = write_mask_page(masks, tmp_path).read_text()
    assert "mean of 10 pairs" in text and "Equal, bit for bit:</strong> client 2, twin." in text
    exactly = held(list(masks.values())).exactly.sum(0)
    for count in exactly:
        assert f">{count}</td>" in text
    assert "1.000" in text  # the pair of twins in the heat map
    assert all(f"only {name}" in text for name in masks)


def test_equal_masks_are_said_to_be_equal_and_not_compared(tmp_path):
    text = write_mask_page({"a": drawn(3), "b": drawn(3)}, tmp_path).read_text()
    assert text == write_mask_page({"a": drawn(3), "b": drawn(3)}, tmp_path).read_text()
    assert "The two masks are equal, bit for bit." in text
    assert "Agreement by depth" not in text and "Allocation" in text


def test_many_masks_and_empty_ones_make_a_page(tmp_path):
    masks = {f"client {number}": drawn(number, 0.1) for number in range(13)} | {"none": Mask.zeros(SPACE)}
    assert "14 masks" in write_mask_page(masks, tmp_path).read_text()
    assert "0.00<small>" in write_mask_page({"none": Mask.zeros(SPACE)}, tmp_path).read_text()
    thin = ParamSpace(("w",), ((3, 3),))
    assert write_mask_page({"none": Mask.zeros(thin), "all": Mask.ones(thin)}, tmp_path).is_file()


@pytest.mark.parametrize(
    "names",
    [
        ["fc1.weight", "fc1.bias"],  # nothing but what lies around the blocks
        ["blocks.0.weight", "blocks.1.weight"],  # nothing around them
        ["layers.0.blocks.0.w", "layers.0.blocks.1.w", "layers.1.downsample.w", "head.w"],
        [f"blocks.{number}.w" for number in range(40)],
        [f"part{number}.w" for number in range(60)],
    ],
)
def test_every_kind_of_network_can_be_drawn(names):
    space = ParamSpace(tuple(names), ((3, 3),) * len(names))
    assert all(svg.endswith("</svg>\n") for svg in allocation_figures(drawn(0, 0.5, space)).values())


def test_more_masks_than_names_fit_are_numbered():
    names = [f"client {number}" for number in range(31)]
    svg = pair_map(np.full(31 * 15, 0.25), np.full(31 * 15, np.nan), names)
    assert "client" not in svg and ">31<" in svg.replace(" ", "")


def test_masks_that_cannot_be_compared_are_named(tmp_path):
    with pytest.raises(FedsieveError, match="other and one cannot be compared: the mask does not fit"):
        write_mask_page({"one": drawn(0), "other": drawn(0, space=space_of(depth=2))}, tmp_path)
    with pytest.raises(FedsieveError, match="no masks given"):
        write_mask_page({}, tmp_path)


# --- on the page of a run --------------------------------------------------------------------------------------------


def say(folder, stage, **fields):
    summary = json.loads((folder / "summary.json").read_text())
    summary["stages"][stage] |= fields
    (folder / "summary.json").write_text(json.dumps(summary))


def test_a_run_shows_the_masks_of_its_stages(make_run):
    folder = make_run("run")
    (folder / "predictions.npz").unlink()
    mask = with_counts({"backbone.cls_token": 0, "head.bias": 1})
    mask.save(folder / "masks" / "backbone.safetensors")
    told = {"sparsity": 0.8765, "active": 12_321, "rule": "least_sensitive", "calibration_seconds": 4.2}
    say(folder, "backbone", mask_id=mask.id, **told)
    text = write_report(folder).read_text()
    assert "Damaged" not in text
    assert "<h2>Mask of backbone</h2>" in text and mask.id[:12] in text and "least_sensitive" in text
    assert f"1 of {len(SPACE.names)} tensors</strong> are emptied but for the floor" in text
    stages = text[text.index("<h2>Stages") : text.index("<h2>Training")]
    assert "12,321" in stages and "87.65" in stages
    assert {"mask-backbone-tensors.svg", "mask-backbone-blocks.svg"} <= {p.name for p in (folder / "figures").iterdir()}


def test_a_dense_run_says_nothing_of_masks(make_run):
    text = write_report(make_run("run")).read_text()
    assert "<h2>Mask" not in text and "sparsity" not in text[text.index("<h2>Stages") : text.index("<h2>Training")]


def test_a_damaged_mask_is_told_on_the_page_and_the_others_are_shown_while_the_run_is_unfinished(make_run):
    folder = make_run("run", finished=False)
    drawn(0).save(folder / "masks" / "head.safetensors")
    drawn(1).save(folder / "masks" / "backbone.safetensors")
    whole = (folder / "masks" / "head.safetensors").read_bytes()
    (folder / "masks" / "head.safetensors").write_bytes(whole[:-9])
    (folder / "masks" / "other.safetensors").write_bytes(b"")
    (folder / "masks" / "third.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    text = write_report(folder).read_text()
    for name in ("head", "other", "third"):
        assert f"<p>masks/{name}.safetensors: cannot be used as a mask" in text
        assert f"<h2>Mask of {name}</h2>" not in text
    assert "<h2>Mask of backbone</h2>" in text


def test_a_mask_that_is_not_the_summarys_and_a_damaged_summary_are_told(make_run):
    folder = make_run("run")
    drawn(1).save(folder / "masks" / "backbone.safetensors")
    (folder / "predictions.npz").unlink()
    (folder / "metrics.jsonl").unlink()
    say(folder, "backbone", mask_id=drawn(2).id)
    assert "masks/backbone.safetensors is not the mask of the run" in write_report(folder).read_text()
    say(folder, "backbone", sparsity="much")
    text = write_report(folder).read_text()
    assert "summary.json is damaged: stages.backbone.sparsity" in text and "<h2>Mask of backbone</h2>" in text
