"""Two processes never work in one run folder, and whoever is refused leaves it as it was."""

import multiprocessing
import os
from pathlib import Path

import pytest

from fedsieve.errors import FedsieveError
from fedsieve.runner.checkpoint import list_checkpoints
from fedsieve.runner.claim import LOCK, Busy, check_free, claimed, held

ME = f"process {os.getpid()} on "


def wrong() -> FedsieveError:
    return FedsieveError("a wrong request")


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_claimed_folder_is_refused_with_the_process_that_claimed_it_and_left_as_it_was(tmp_path):
    folder = tmp_path / "run"
    with claimed(folder):
        for name in (".config.yaml.x", "config.yaml", "summary.json"):
            before = content(folder)
            for claim in (claimed, held):
                with (
                    pytest.raises(Busy, match=f"another process is working on this run .{ME}") as caught,
                    claim(folder),
                ):
                    pass
                assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
            assert content(folder) == before
            (folder / name).write_text("mine")
        with pytest.raises(
            FedsieveError, match=f"--out: .*run is there already: {ME}.* is working on it, or was killed"
        ):
            check_free(folder)
    with pytest.raises(FedsieveError, match="is there already: `fedsieve resume .*run` continues it"):
        check_free(folder)
    with held(folder):
        pass


@pytest.mark.parametrize("end", [None, RuntimeError("a fault"), FedsieveError("no data", 1), KeyboardInterrupt()])
def test_the_lock_ends_with_the_work_however_that_ends(tmp_path, end):
    try:
        with claimed(tmp_path / "run"):
            (tmp_path / "run" / "config.yaml").touch()
            if end:
                raise end
    except BaseException as error:
        assert error is end
    assert (tmp_path / "run" / "config.yaml").exists()
    with held(tmp_path / "run"):
        pass


def test_the_lock_ends_with_the_work_while_a_forked_process_lives_on(tmp_path):
    fork = multiprocessing.get_context("fork")
    with claimed(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").touch()
        end = fork.Event()
        other = fork.Process(target=end.wait)
        other.start()
    try:
        with held(tmp_path / "run"):
            pass
    finally:
        end.set()
        other.join()


def test_a_wrong_request_deletes_what_it_made_and_nothing_else(tmp_path):
    there, elsewhere, link = tmp_path / "there", tmp_path / "elsewhere", tmp_path / "link"
    there.mkdir(), elsewhere.mkdir(), link.symlink_to(elsewhere)
    (there / ".config.yaml.left").touch()
    (elsewhere / LOCK).touch()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").touch()
    for folder in (tmp_path / "new" / "run", there, link):
        with pytest.raises(FedsieveError, match="a wrong request"), claimed(folder):
            (folder / "checkpoints").mkdir()
            (folder / "checkpoints" / "dp.key").touch()
            (folder / "config.yaml").touch()
            (folder / "metrics.jsonl").touch()
            (folder / "data").symlink_to(tmp_path / "images")
            raise wrong()
    assert not (tmp_path / "new" / "run").exists()
    assert os.listdir(there) == [".config.yaml.left"] and link.is_symlink() and os.listdir(elsewhere) == []
    assert (tmp_path / "images" / "1.png").exists()


@pytest.mark.parametrize("made", ["metrics.jsonl", "checkpoints/0000000001.ckpt"])
def test_a_run_that_has_trained_is_kept_whatever_ends_it(tmp_path, made):
    with pytest.raises(FedsieveError), claimed(tmp_path / "run"):
        (tmp_path / "run" / "checkpoints").mkdir()
        (tmp_path / "run" / made).write_text("{}\n")
        raise wrong()
    assert (tmp_path / "run" / made).exists()


@pytest.mark.parametrize("name", ["photo.png", "config.yaml", ".claims"])
def test_a_folder_with_anything_in_it_is_refused_and_left_as_it_was(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(FedsieveError, match="--out: .* is there already"), claimed(tmp_path):
        raise AssertionError
    assert (tmp_path / name).exists() and list_checkpoints(tmp_path) == []


def test_what_cannot_be_a_folder_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for place in (tmp_path / "file" / "run", tmp_path / "nowhere", Path("/proc/nothing/run")):
        with pytest.raises(FedsieveError, match=f"--out: {place} cannot be written: ") as caught, claimed(place):
            raise AssertionError
        assert caught.value.exit_code == 2


def contend(folder: Path, start, wins: int) -> None:
    """Claim a folder again and again, and give it back each time, as a wrong request does."""
    start.wait()
    while wins:
        try:
            with claimed(folder):
                (folder / "alone").mkdir()  # fails where another process has done so
                assert {*os.listdir(folder)} == {LOCK, "alone"}
                raise wrong()
        except Busy:
            continue
        except FedsieveError as error:
            assert str(error) == "a wrong request"
            wins -= 1


def test_processes_that_claim_a_folder_and_give_it_back_are_never_in_it_together(tmp_path):
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(4)
    workers = [fork.Process(target=contend, args=(tmp_path / "run", start, 50)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert not any(tmp_path.rglob("*/*"))
