import io
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import fedsieve.data.sources as sources
from fedsieve.config import Data
from fedsieve.data.image_tables import kind_of
from fedsieve.data.sources import count_images, keep_classes, load_images, survey
from fedsieve.data.store import ImageStore, to_rows
from fedsieve.errors import FedsieveError


def picture(seed: int, size: tuple[int, int] = (6, 6)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def encoded(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(file, seeds, labels, image="img", label="label", size=(6, 6)):
    rows = [{"bytes": encoded(picture(seed, size)), "path": None} for seed in seeds]
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({image: rows, label: labels}), file)


@pytest.fixture
def parquet(tmp_path):
    """Two training shards and a test shard."""
    folder = tmp_path / "set"
    write_parquet(folder / "train-00000-of-00002.parquet", range(10), [0, 1] * 5)
    write_parquet(folder / "train-00001-of-00002.parquet", range(10, 20), [1, 2] * 5)
    write_parquet(folder / "test-00000-of-00001.parquet", range(50, 56), [0, 1, 2] * 2)
    return folder


@pytest.fixture
def data(tmp_path):
    return lambda folder, **fields: Data(source=str(folder), cache=str(tmp_path / "cache"), **fields)


def test_parquet_pixels_and_labels_arrive_in_order(parquet, data):
    train, test = (load_images(data(parquet), split) for split in ("train", "test"))
    expected = np.stack([picture(seed).transpose(2, 0, 1) for seed in range(20)])
    np.testing.assert_array_equal(train.images.numpy(), expected)
    assert train.labels.tolist() == [0, 1] * 5 + [1, 2] * 5
    np.testing.assert_array_equal(test.images[3].numpy(), picture(53).transpose(2, 0, 1))
    assert train.class_names == test.class_names == ["0", "1", "2"]


def test_a_second_load_decodes_nothing_and_a_changed_file_does(parquet, data, monkeypatch):
    first = load_images(data(parquet), "train")
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_decode", lambda *_: pytest.fail("decoded again"))
        again = load_images(data(parquet), "train")
        # The fingerprint is of the content: a copy elsewhere, with other times, needs no decoding either.
        copied = load_images(data(shutil.copytree(parquet, parquet.parent / "copy")), "train")
    assert torch.equal(first.images, again.images) and torch.equal(first.images, copied.images)
    write_parquet(parquet / "train-00001-of-00002.parquet", range(30, 40), [1, 2] * 5)
    assert not torch.equal(load_images(data(parquet), "train").images, first.images)


def test_folders_of_images_by_class(tmp_path, data):
    for split, count in (("train", 4), ("test", 2)):
        for number, name in enumerate(("cat", "dog")):
            for item in range(count):
                file = tmp_path / "set" / split / name / f"{item}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture(100 * number + item)).save(file)
    train = load_images(data(tmp_path / "set"), "train")
    assert train.class_names == ["cat", "dog"]
    assert train.labels.tolist() == [0] * 4 + [1] * 4
    np.testing.assert_array_equal(train.images[5].numpy(), picture(101).transpose(2, 0, 1))
    assert count_images(data(tmp_path / "set")) == (8, 4, 2, 108)


def test_a_label_map_numbers_classes_and_refuses_others_before_and_after_decoding(tmp_path, data):
    make_folders(tmp_path / "set", [f"{name}/{number}.png" for name in ("cat", "dog") for number in range(3)])
    config = data(tmp_path / "set", test_fraction=0.34, class_names=["ant", "dog", "bee", "cat"])
    for _ in range(2):  # not yet cached, and cached
        labels, names, _ = survey(config, "train")
        images = load_images(config, "train")
        assert names == images.class_names == ["ant", "dog", "bee", "cat"]
        assert labels.tolist() == images.labels.tolist() == [3, 3, 1, 1]
    with pytest.raises(FedsieveError, match='has a class "cat", which is not in the label map'):
        survey(data(tmp_path / "set", class_names=["ant", "dog"]), "train")


def test_images_of_several_sizes_are_stored_as_squares(tmp_path, data):
    rows = [{"bytes": encoded(picture(i, size)), "path": None} for i, size in enumerate([(60, 40), (40, 60), (50, 50)])]
    for split in ("train", "test"):
        (tmp_path / "set").mkdir(exist_ok=True)
        pq.write_table(pa.table({"image": rows, "label": [0, 1, 0]}), tmp_path / "set" / f"{split}.parquet")
    images = load_images(data(tmp_path / "set", size=28), "train").images
    assert images.shape == (3, 3, 32, 32)
    # Half the height of a 60x40 picture is kept whole: its mean colour survives the resize.
    middle = picture(0, (60, 40))[:, 10:50].mean((0, 1))
    np.testing.assert_allclose(images[0].float().mean((1, 2)), middle, atol=3)
    # The cache is found again for this size.
    assert load_images(data(tmp_path / "set", size=28), "train").images.shape == (3, 3, 32, 32)
    assert load_images(data(tmp_path / "set", size=14), "train").images.shape == (3, 3, 16, 16)


def test_without_a_test_split_one_is_held_out_and_does_not_follow_the_seed(tmp_path, data):
    write_parquet(tmp_path / "set" / "train.parquet", range(30), [0, 1, 2] * 10)
    config = data(tmp_path / "set", test_fraction=0.3)
    assert count_images(config)[:3] == (21, 9, 3)
    train, test = load_images(config, "train"), load_images(config, "test")
    assert count_images(config)[:3] == (21, 9, 3)
    assert len(train) == 21 and test.labels.bincount().tolist() == [3, 3, 3]
    pixels = {image.numpy().tobytes() for image in [*train.images, *test.images]}
    assert len(pixels) == 30
    assert torch.equal(load_images(config, "test").images, test.images)


def test_a_mistyped_test_split_is_refused_and_does_not_reach_the_cache(parquet, data):
    """Held out by mistake, test rows would be trained on, or the real test file never read."""
    for first, second in ((None, "tset"), ("tset", None)):
        for name in (first, second):
            if name:
                with pytest.raises(FedsieveError, match='test_split: .* no split "tset".*Did you mean "test"'):
                    load_images(data(parquet, test_split=name), "train")
            else:
                train, test = (load_images(data(parquet), split) for split in ("train", "test"))
                assert (len(train), len(test)) == (20, 6)
                assert not {i.numpy().tobytes() for i in train.images} & {i.numpy().tobytes() for i in test.images}


def make_folders(root, layout, size=(6, 6)):
    for number, name in enumerate(layout):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number, size)).save(file)


def test_names_that_look_like_splits_drop_no_image(tmp_path, data):
    make_folders(
        tmp_path / "set", [f"{c}/{n}.png" for c in ("cat", "dog") for n in ("a", "my_test_photo", "train_x", "b", "c")]
    )
    config = data(tmp_path / "set", test_fraction=0.2)
    assert len(load_images(config, "train")) + len(load_images(config, "test")) == 10


def test_a_class_may_be_called_train(tmp_path, data):
    make_folders(tmp_path / "set", [f"{c}/{n}.png" for c in ("train", "bus") for n in range(5)])
    assert load_images(data(tmp_path / "set"), "train").class_names == ["bus", "train"]


def test_one_class_is_refused_with_the_layout(tmp_path, data):
    make_folders(tmp_path / "set", [f"only/{n}.png" for n in range(5)])
    with pytest.raises(FedsieveError, match="two classes at least"):
        load_images(data(tmp_path / "set"), "train")


def test_moving_an_image_to_another_class_is_noticed(tmp_path, data):
    make_folders(tmp_path / "set", [f"{c}/{n}.png" for c in ("a", "b") for n in range(5)])
    config = data(tmp_path / "set", test_fraction=0.1)
    before = load_images(config, "train").fingerprint
    (tmp_path / "set" / "a" / "4.png").rename(tmp_path / "set" / "b" / "0a.png")
    after = [load_images(config, split) for split in ("train", "test")]
    assert before != after[0].fingerprint
    assert torch.cat([part.labels for part in after]).bincount().tolist() == [4, 6]


def test_grey_of_16_bits_alpha_and_orientation_are_read_as_seen(tmp_path, data):
    folder = tmp_path / "set" / "train"
    deep = np.full((6, 6), 257 * 100, dtype=np.uint16)
    clear = np.zeros((6, 6, 4), dtype=np.uint8)  # black, wholly transparent
    turned = np.zeros((6, 6, 3), dtype=np.uint8)
    turned[:3] = 255
    for name in "abc":
        (folder / name).mkdir(parents=True)
    Image.fromarray(deep).save(folder / "a" / "x.png")
    Image.fromarray(clear).save(folder / "b" / "x.png")
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.fromarray(turned).save(folder / "c" / "x.png", exif=exif)
    (tmp_path / "set" / "test").mkdir()
    shutil.copytree(folder, tmp_path / "set" / "test", dirs_exist_ok=True)
    a, b, c = load_images(data(tmp_path / "set"), "train").images
    assert (a == 100).all() and (b == 255).all()
    assert (c[:, :3] == 0).all() and (c[:, 3:] == 255).all()


def test_wide_images_are_never_squashed(tmp_path, data):
    """Train all of one size, test of several: both keep the middle square."""
    make_folders(tmp_path / "set" / "train", [f"{c}/{n}.png" for c in "ab" for n in range(3)], (20, 10))
    make_folders(tmp_path / "set" / "test", [f"{c}/{n}.png" for c in "ab" for n in range(3)], (30, 12))
    shapes = {load_images(data(tmp_path / "set", size=8), split).images.shape[2:] for split in ("train", "test")}
    assert shapes == {(9, 9)}


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, None, 1, 1], "row 1 has no label"),
        ([0.5, 1.0, 1.0, 0.5], "whole numbers or words"),
        ([[0], [1], [0], [1]], "holds"),
    ],
)
def test_labels_that_are_none_are_refused(tmp_path, data, labels, said):
    write_parquet(tmp_path / "set" / "train.parquet", range(4), labels)
    with pytest.raises(FedsieveError, match=said):
        load_images(data(tmp_path / "set", label_column="label"), "train")


def test_scattered_numbers_and_booleans_are_classes_too(tmp_path, data):
    write_parquet(tmp_path / "set" / "train.parquet", range(6), [10, 60, 110] * 2)
    write_parquet(tmp_path / "set" / "test.parquet", range(2), [110, 10])
    assert load_images(data(tmp_path / "set"), "train").class_names == ["10", "60", "110"]
    assert load_images(data(tmp_path / "set"), "test").labels.tolist() == [2, 0]
    write_parquet(tmp_path / "two" / "train.parquet", range(10), [True, False] * 5)
    assert load_images(data(tmp_path / "two"), "train").class_names == ["False", "True"]


def test_a_split_without_images_is_refused(tmp_path, data):
    write_parquet(tmp_path / "set" / "train.parquet", range(2), [0, 1])
    with pytest.raises(FedsieveError, match="leaves none to test on"):
        load_images(data(tmp_path / "set", test_fraction=0.1), "test")


def test_text_labels_are_numbered_by_the_training_split(tmp_path, data):
    write_parquet(tmp_path / "set" / "train.parquet", range(4), ["dog", "cat", "dog", "eel"])
    write_parquet(tmp_path / "set" / "test.parquet", range(2), ["eel", "cat"])
    assert load_images(data(tmp_path / "set"), "train").class_names == ["cat", "dog", "eel"]
    assert load_images(data(tmp_path / "set"), "test").labels.tolist() == [2, 0]


def test_a_truncated_parquet_file_is_named(parquet, data):
    file = parquet / "train-00001-of-00002.parquet"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(FedsieveError, match="train-00001-of-00002.parquet: damaged"):
        load_images(data(parquet), "train")


def test_a_parquet_file_damaged_in_the_middle_is_named(parquet, data):
    file = parquet / "train-00001-of-00002.parquet"
    content = bytearray(file.read_bytes())
    content[4:400] = b"\x00" * 396
    file.write_bytes(content)
    with pytest.raises(FedsieveError, match="train-00001-of-00002.parquet"):
        load_images(data(parquet), "train")


def test_a_damaged_image_is_named(tmp_path, data):
    for name in ("cat", "dog"):
        folder = tmp_path / "set" / "train" / name
        folder.mkdir(parents=True)
        for item in range(3):
            Image.fromarray(picture(item, (30, 30))).save(folder / f"{item}.png")
    broken = tmp_path / "set" / "train" / "dog" / "1.png"
    broken.write_bytes(broken.read_bytes()[:300])
    with pytest.raises(FedsieveError, match="dog/1.png"):
        load_images(data(tmp_path / "set"), "train")
    broken.write_bytes(b"no image")
    with pytest.raises(FedsieveError, match="dog/1.png"):
        load_images(data(tmp_path / "set"), "train")


def test_a_training_class_without_images_is_refused_by_name_and_shifts_no_label(tmp_path, data):
    for split, name in (("train", "ant"), ("train", "cow"), ("test", "ant"), ("test", "cow")):
        folder = tmp_path / "set" / split / name
        folder.mkdir(parents=True)
        Image.fromarray(picture(len(name))).save(folder / "0.png")
    (tmp_path / "set" / "train" / ".cache").mkdir()
    (tmp_path / "set" / "test" / "bee").mkdir()  # only testing lacks it: no label depends on that
    assert load_images(data(tmp_path / "set"), "train").class_names == ["ant", "cow"]
    bee = tmp_path / "set" / "train" / "bee"
    bee.mkdir()
    (bee / "._0.png").write_bytes(b"what another system leaves beside a picture")
    for look in (load_images, survey):
        with pytest.raises(FedsieveError, match="train/bee is a class folder without images"):
            look(data(tmp_path / "set"), "train")
    names = ["ant", "bee", "cow"]
    assert load_images(data(tmp_path / "set", class_names=names), "train").labels.tolist() == [0, 2]


def test_an_image_in_a_parquet_row_that_cannot_be_read_is_named_by_row(tmp_path, data):
    rows = [{"bytes": encoded(picture(0)), "path": None}, {"bytes": b"rubbish", "path": None}]
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table({"image": rows, "label": [0, 1]}), tmp_path / "set" / "train.parquet")
    write_parquet(tmp_path / "set" / "test.parquet", range(2), [0, 1], image="image")
    with pytest.raises(FedsieveError, match="row 1"):
        load_images(data(tmp_path / "set"), "train")


def test_labels_out_of_range_and_unknown_columns_are_refused(tmp_path, data):
    write_parquet(tmp_path / "set" / "train.parquet", range(4), [0, 1, 0, 1])
    write_parquet(tmp_path / "set" / "test.parquet", range(4), [0, 1, 2, -1])
    with pytest.raises(FedsieveError, match="row 2 has the label 2"):
        load_images(data(tmp_path / "set"), "test")
    with pytest.raises(FedsieveError, match='label_column: .* no column "lable".* Did you mean "label"'):
        load_images(data(tmp_path / "set", label_column="lable"), "train")
    with pytest.raises(FedsieveError, match='train_split: .* no split "training"'):
        load_images(data(tmp_path / "set", train_split="training"), "train")


def test_sources_that_are_not_there_are_refused(tmp_path, data):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(FedsieveError, match="no parquet file and no image"):
        load_images(data(tmp_path / "empty"), "train")
    with pytest.raises(FedsieveError, match="is a file"):
        kind_of(str(tmp_path / "file.txt"))
    with pytest.raises(FedsieveError, match='Did you mean "digits"'):
        kind_of("digit")
    with pytest.raises(FedsieveError, match="no such folder"):
        kind_of(str(tmp_path / "missing"))
    assert kind_of("uoft-cs/cifar100") == "hub"


def test_an_unreachable_hub_set_says_what_to_do_offline(data):
    with pytest.raises(FedsieveError, match=r"hub.*\n.*data.source=digits"):
        load_images(data("nobody-there/no-such-set"), "train")


def test_a_damaged_cache_is_refused_with_the_remedy(parquet, data, tmp_path):
    load_images(data(parquet), "train")
    (file,) = (tmp_path / "cache" / "images").glob("*/images.npy")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(FedsieveError, match="Delete the folder"):
        load_images(data(parquet), "train")


def test_digits_are_two_coloured_and_split_once():
    train, test = (load_images(Data(source="digits"), split) for split in ("train", "test"))
    assert len(train) + len(test) == 1797
    assert train.images.shape[1:] == (3, 8, 8)
    assert count_images(Data(source="digits")) == (len(train), len(test), 10, 192)


@pytest.mark.parametrize(("fraction", "use"), [(1e-4, "test"), (1 - 1e-4, "train")])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_held_out_split_of_nothing_is_refused_with_whichever_part_is_opened_first(fraction, use, split):
    with pytest.raises(FedsieveError, match=f"data.test_fraction: .* of 1,797 images leaves none to {use} on"):
        load_images(Data(source="digits", test_fraction=fraction), split)


def test_classes_are_kept_in_the_order_asked_for():
    images = load_images(Data(source="digits"), "test")
    rows, labels, names = keep_classes(images, np.arange(len(images)), [7, 2])
    assert names == ["7", "2"]
    assert {(int(images.labels[row]), int(label)) for row, label in zip(rows, labels, strict=True)} == {(7, 0), (2, 1)}
    with pytest.raises(FedsieveError, match="no class 12"):
        keep_classes(images, np.arange(3), [12, 1])


def test_mapped_and_resident_stores_hand_out_the_same(parquet, data):
    images = load_images(data(parquet), "train").images
    rows = to_rows(np.array([3, 3, 0, 19]))
    resident, mapped = (ImageStore(images, torch.device("cpu"), placement) for placement in ("device", "mapped"))
    assert torch.equal(resident.batch(rows), mapped.batch(rows))
    assert ImageStore(images, torch.device("cpu")).placement == "device"
