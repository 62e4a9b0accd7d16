"""A run killed at any moment ends, resumed, with the weights and metrics of one that was not."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.conftest import TINY
from tests.federation.conftest import CONFIG, SPARSE

from fedsieve.cli import main
from fedsieve.config import parse_config
from fedsieve.errors import FedsieveError
from fedsieve.files import with_notes
from fedsieve.runner import journal
from fedsieve.runner.checkpoint import list_checkpoints
from fedsieve.runner.claim import held
from fedsieve.runner.journal import restore_metrics
from fedsieve.runner.progress import Display
from fedsieve.runner.run import resume, run

SLOW_ENOUGH = """
name: killed
seed: 1
device: cpu
data: {source: digits, size: 8, transform: crop_flip, normalize: data, val_fraction: 0.2}
model:
  backbone: vit_tiny_patch16_224
  options: {patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}
  weights: none
stages:
  - {name: head, train: head, epochs: 3, batch_size: 100, optimizer: {lr: 0.1}}
  - name: all
    train: all
    mask: {rule: least_sensitive, sparsity: 0.5, calibration_rounds: 2, fisher: {samples: 30}}
    epochs: 3
    batch_size: 100
    optimizer: {lr: 0.05, weight_decay: 1e-4}
tracking: [tensorboard]
checkpoint: {every_seconds: 0}
"""
TIMES = {"seconds", "images_per_second", "calibration_seconds"}

# A server that has imported everything and run nothing: children start in milliseconds and inherit no threads.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["fedsieve.cli", "fedsieve.runner.run", "timm", "datasets", "matplotlib", "sklearn.datasets"]
)


def work(folder, overrides=(), crash_at=None):
    """What a process does: start the run, or go on with it. `crash_at` kills it at its n-th write to the disk."""
    torch.set_num_threads(1)
    if crash_at is not None:
        count = iter(range(crash_at))

        def deadly(call):
            def wrapped(*arguments, **options):
                if next(count, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            return wrapped

        os.fsync, os.replace, os.rename = deadly(os.fsync), deadly(os.replace), deadly(os.rename)
    if (folder / "config.yaml").exists():
        resume(folder)
    else:
        run(parse_config(SLOW_ENOUGH, overrides), folder)


def start(folder, *arguments):
    process = processes.Process(target=work, args=(folder, *arguments))
    process.start()
    return process


def finish(process, seconds=120):
    process.join(seconds)
    assert process.exitcode is not None, "the run did not end"
    return process.exitcode


def outcome(folder):
    """Everything that must be the same: final weights, and metrics and summary without their timings."""

    def timeless(value):
        if isinstance(value, dict):
            return {key: timeless(item) for key, item in value.items() if key not in TIMES}
        return value

    metrics = [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = timeless(json.loads((folder / "summary.json").read_text()))
    weights = safetensors.torch.load_file(folder / "checkpoints" / "final.safetensors")
    return metrics, summary, weights


def assert_same(one, two):
    assert one[0] == two[0]
    assert one[1] == two[1]
    assert one[2].keys() == two[2].keys()
    assert all(torch.equal(one[2][name], two[2][name]) for name in one[2])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    base = tmp_path_factory.mktemp("reference")
    for name in ("first", "second"):
        assert finish(start(base / name)) == 0
    assert_same(outcome(base / "first"), outcome(base / "second"))
    return outcome(base / "first")


@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again_at_random_moments(tmp_path, undisturbed, seed):
    """By progress, so that it does not depend on how fast the machine is: some steps further, then a random moment."""
    chance = random.Random(seed)
    reached = kills = 0
    while True:
        target = reached + chance.randint(1, 30)
        process = start(tmp_path / "run")
        while process.exitcode is None and reached < target:
            checkpoints = list_checkpoints(tmp_path / "run" / "checkpoints")
            reached = max(reached, int(checkpoints[-1].stem) if checkpoints else 0)
            time.sleep(0.001)
        process.join(chance.uniform(0, 0.02))
        if process.exitcode is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
    assert process.exitcode == 0
    assert kills >= 2
    assert_same(outcome(tmp_path / "run"), undisturbed)
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("crash_at", [0, 1, 2, 3, 4, 5, 6, 8, 11, 20, 33, 55, 90, 140, 200])
def test_killed_at_a_write_to_the_disk(tmp_path, undisturbed, crash_at):
    process = start(tmp_path / "run", (), crash_at)
    assert finish(process) in (-signal.SIGKILL, 0)
    assert finish(start(tmp_path / "run")) == 0
    assert_same(outcome(tmp_path / "run"), undisturbed)


def test_a_polite_stop_saves_and_says_how_to_go_on(tmp_path, undisturbed):
    """SIGTERM with checkpoints an hour apart: what is saved is saved because of the signal."""
    folder = tmp_path / "run"
    process = start(folder, ("checkpoint.every_seconds=3600",))
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        time.sleep(0.01)
    process.terminate()
    finish(process)
    assert len(list_checkpoints(folder / "checkpoints")) >= 1
    assert finish(start(folder)) == 0
    assert_same(outcome(folder), undisturbed)


def test_a_stop_before_training_is_obeyed_at_once(tmp_path, tiny, monkeypatch):
    """Decoding or computing features may take minutes: nobody waits for them after Ctrl-C."""
    monkeypatch.setattr("fedsieve.runner.run_cache.load_images", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(FedsieveError, match="stopped.*fedsieve resume") as caught:
        run(tiny(), tmp_path / "run")
    assert caught.value.exit_code == 130
    monkeypatch.undo()
    assert resume(tmp_path / "run")["name"] == "tiny"


def test_a_stop_while_training_ends_with_its_own_code(tmp_path, tiny):
    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(FedsieveError, match="nothing is lost") as caught:
        patch.setattr("fedsieve.runner.progress.Display.step", stop)
        run(tiny(), tmp_path / "run")
    assert caught.value.exit_code == 143
    assert list_checkpoints(tmp_path / "run" / "checkpoints")


def stop_after(folder, epochs):
    process = start(folder)
    while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").read_bytes().count(b"\n") < epochs:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_a_damaged_newest_checkpoint_falls_back(tmp_path, undisturbed):
    folder = tmp_path / "run"
    stop_after(folder, 4)
    newest = list_checkpoints(folder / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    assert finish(start(folder)) == 0
    assert_same(outcome(folder), undisturbed)
    assert newest.with_suffix(".damaged").exists()


def test_with_every_checkpoint_damaged_the_run_starts_over(tmp_path, undisturbed):
    folder = tmp_path / "run"
    stop_after(folder, 4)
    for path in list_checkpoints(folder / "checkpoints"):
        path.write_bytes(b"rubbish")
    assert finish(start(folder)) == 0
    assert_same(outcome(folder), undisturbed)


def test_a_full_disk_ends_with_a_message_and_an_intact_checkpoint(tmp_path, tiny, monkeypatch, undisturbed):
    folder = tmp_path / "run"
    import fedsieve.files

    fsync, count = os.fsync, iter(range(12))

    def full(handle):
        if next(count, None) is None:
            raise OSError(28, "No space left on device")
        fsync(handle)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with monkeypatch.context() as patch:
        patch.setattr(fedsieve.files.os, "fsync", full)
        with pytest.raises(
            FedsieveError, match=r"disk is full.*last checkpoint, .*ckpt, is intact.*fedsieve resume"
        ) as caught:
            run(parse_config(SLOW_ENOUGH), folder)
    assert caught.value.exit_code == 1
    resume(folder)
    torch.set_num_threads(threads)
    assert_same(outcome(folder), undisturbed)


def test_a_file_system_without_room_ends_the_same_way(tmp_path):
    """A real limit of the system: files larger than 20 KB cannot be written."""
    process = processes.Process(target=limited, args=(tmp_path / "run", tmp_path / "said"))
    process.start()
    assert finish(process) == 0
    assert "disk is full" in (tmp_path / "said").read_text()


def limited(folder, said):
    import resource

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        run(parse_config(SLOW_ENOUGH, ["tracking=[]"]), folder)
    except FedsieveError as error:
        said.write_text(str(error))


def test_changed_weights_are_not_resumed_upon(tmp_path, tiny):
    from fedsieve.model.build import build_classifier

    file = tmp_path / "w.safetensors"
    for seed in (0, 1):
        model = build_classifier(tiny().model, 10, 8, seed)
        safetensors.torch.save_file(model.backbone.state_dict(), file)
        if seed == 0:
            folder = tmp_path / "run"
            run(tiny(f"model.weights={file}"), folder)
            (folder / "summary.json").unlink()
    with pytest.raises(FedsieveError, match="model.weights is not what this run began with"):
        resume(folder)


@pytest.mark.parametrize("damage", [None, b"", b"{}\n", b"rubbish\n" * 400])
def test_metrics_that_were_lost_are_made_again(tmp_path, undisturbed, damage):
    folder = tmp_path / "run"
    stop_after(folder, 4)
    file = folder / "metrics.jsonl"
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    (folder / "environment.json").write_text('{"threads": "two"}')
    assert finish(start(folder)) == 0
    assert_same(outcome(folder), undisturbed)


@pytest.mark.parametrize("content", ["{", "[]", "{}", "null"])
def test_a_damaged_summary_is_made_again(tmp_path, tiny, content):
    summary = run(tiny(), tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text(content)
    assert resume(tmp_path / "run")["test_accuracy"] == summary["test_accuracy"]


def test_an_edited_config_is_not_resumed_upon(tmp_path, tiny):
    folder = tmp_path / "run"
    run(tiny(), folder)
    (folder / "summary.json").unlink()
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("lr: 0.05", "lr: 0.06"))
    with pytest.raises(FedsieveError, match="config.yaml is not what this run began with"):
        resume(folder)
    (folder / "config.yaml").write_text(text.replace("placement: auto", "placement: mapped"))
    resume(folder)  # where images are kept decides nothing


def test_a_finished_run_is_not_run_again(tmp_path, tiny):
    summary = run(tiny(), tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    assert resume(tmp_path / "run") == summary
    assert (tmp_path / "run" / "report.html").exists()


def test_two_processes_cannot_share_a_run(tmp_path, tiny):
    run(tiny(), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with held(tmp_path / "run"), pytest.raises(FedsieveError, match="another process"):
        resume(tmp_path / "run")


# --- two runs at once -------------------------------------------------------------------------------------------------


def seeds_of(folder):
    """The seeds that a run folder's files name. They are one where a single run wrote all of them."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return {config["seed"], json.loads((folder / "summary.json").read_text())["seed"]}


def compete(start, folder, seed, said):
    """Run into a folder as soon as all others are ready to."""
    torch.set_num_threads(1)
    experiment = parse_config(TINY, [f"seed={seed}"])
    start.wait()
    try:
        run(experiment, folder, page=False)
    except FedsieveError as error:
        said.write_text(str(error))
        os._exit(error.exit_code)


@pytest.mark.parametrize("repetition", range(3))
def test_of_new_runs_in_one_folder_one_goes_on_and_the_others_leave_it_alone(tmp_path, repetition):
    start, folder = processes.Barrier(3), tmp_path / "new" / "run"
    started = [
        processes.Process(target=compete, args=(start, folder, seed, tmp_path / f"said-{seed}")) for seed in range(3)
    ]
    for process in started:
        process.start()
    codes = [finish(process) for process in started]
    assert sorted(codes) == [0, 2, 2]
    winner = codes.index(0)
    assert seeds_of(folder) == {winner}
    run(parse_config(TINY, [f"seed={winner}"]), tmp_path / "alone", page=False)
    assert_same(outcome(folder), outcome(tmp_path / "alone"))
    for seed in {0, 1, 2} - {winner}:
        said = (tmp_path / f"said-{seed}").read_text()
        assert f"process {started[winner].pid} on " in said and "\n" not in said


def name_one(start, place, seed):
    """Run a config from the command line, without saying where to."""
    torch.set_num_threads(1)
    os.chdir(place)
    start.wait()
    main(["run", "tiny.yaml", "--quiet", f"seed={seed}"])


def test_new_runs_without_a_folder_each_get_one_of_their_own(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    start = processes.Barrier(3)
    started = [processes.Process(target=name_one, args=(start, tmp_path, seed)) for seed in range(3)]
    for process in started:
        process.start()
    assert [finish(process) for process in started] == [0, 0, 0]
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == ["tiny", "tiny-2", "tiny-3"]
    assert sorted(map(seeds_of, folders), key=min) == [{0}, {1}, {2}]
    assert all((folder / "report.html").exists() for folder in folders)


# --- damaged metrics --------------------------------------------------------------------------------------------------

KINDS = {
    "central": parse_config(TINY, ["checkpoint.every_seconds=0"]),
    "federated": parse_config(CONFIG, [*SPARSE, "checkpoint.every_seconds=0", "stages.all.rounds=4"]),
}


class Stop(Exception):
    pass


class Watched(Display):
    """A display that notes what a run says, and stops it after some records, before it can save the last of them."""

    def __init__(self, records: float = float("inf")) -> None:
        super().__init__(Console(quiet=True))
        self.left, self.said = records, []

    def say(self, text):
        self.said.append(text)

    def step(self, stage, tick):
        if tick.record:
            self.left -= 1
            if self.left <= 0:
                raise Stop


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """cut(kind, records) -> what a run comes to, and the folder of one that was stopped after so many records."""
    base, threads = tmp_path_factory.mktemp("cut"), torch.get_num_threads()
    torch.set_num_threads(1)
    for kind, experiment in KINDS.items():
        run(experiment, base / kind, page=False)
        for records in (1, 2, 3):
            with pytest.raises(Stop):
                run(experiment, base / f"{kind}-{records}", Watched(records), page=False)
    torch.set_num_threads(threads)
    return lambda kind, records: (outcome(base / kind), base / f"{kind}-{records}")


def damage(content, draw):
    """Bytes that were flipped, put in or taken out somewhere, as a disk or an editor may do it."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(["flip", "insert", "delete"]))
        more = draw(st.sampled_from([b"0", b"9", b" ", b"\n", b"}\n{", b"\xff"]))
        length = 0 if kind == "insert" else draw(st.integers(1, 40)) if kind == "delete" else 1
        if kind == "flip" and content[place : place + 1]:
            more = bytes([content[place] ^ 1 << draw(st.integers(0, 7))])
        content = content[:place] + (b"" if kind == "delete" else more) + content[place + length :]
    return content


@settings(max_examples=30)
@given(data=st.data(), kind=st.sampled_from(list(KINDS)), records=st.sampled_from([1, 2, 3]))
def test_a_run_ends_the_same_whatever_became_of_its_metrics(cut, data, kind, records):
    undisturbed, stopped = cut(kind, records)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(shutil.copytree(stopped, Path(base) / "run"))
        metrics = folder / "metrics.jsonl"
        metrics.write_bytes(damage(metrics.read_bytes(), data.draw))
        resume(folder, page=False)
        assert_same(outcome(folder), undisturbed)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_metrics_cost_no_training_and_what_is_trained_from_there_is_saved(tmp_path, cut, kind):
    undisturbed, stopped = cut(kind, 3)
    folder = Path(shutil.copytree(stopped, tmp_path / "run"))
    newest = list_checkpoints(folder / "checkpoints")[-1]
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes().replace(b"0", b"1", 1))
    watched = Watched(2)
    with pytest.raises(Stop):
        resume(folder, watched, page=False)
    assert list_checkpoints(folder / "checkpoints")[-1] > newest
    told, watched = watched.said, Watched()
    resume(folder, watched, page=False)
    assert_same(outcome(folder), undisturbed)
    assert f"{folder}/metrics.jsonl was changed or cut. It is restored from the checkpoint" in told
    assert len(watched.said) == 1 and "resuming at" in watched.said[0]


@pytest.mark.parametrize("intact", [True, False])
def test_metrics_of_a_finished_run_are_restored_if_its_last_checkpoint_is_intact(tmp_path, cut, intact):
    """An older checkpoint lacks the last records: metrics that it cannot judge are left as they are."""
    folder = Path(shutil.copytree(cut("central", 1)[1].parent / "central", tmp_path / "run"))
    metrics = folder / "metrics.jsonl"
    whole, changed = metrics.read_bytes(), metrics.read_bytes().replace(b"0", b"1", 1)
    metrics.write_bytes(changed)
    if not intact:
        list_checkpoints(folder / "checkpoints")[-1].write_bytes(b"rubbish")
    watched = Watched()
    resume(folder, watched, page=False)
    assert metrics.read_bytes() == (whole if intact else changed)
    assert len(watched.said) == 1 + intact


@given(
    lines=st.lists(st.text("ab{}0", max_size=4).map(lambda text: f"{text}\n"), max_size=4),
    there=st.none() | st.binary(max_size=12),
    kind=st.sampled_from(["anything", "longer", "changed"]),
)
def test_metrics_become_the_lines_of_a_checkpoint_and_only_a_loss_is_told(lines, there, kind):
    content, said = "".join(lines).encode(), []
    if kind == "longer" and there is not None:
        there = content + there
    if kind == "changed" and lines:  # one digit, and the length stays
        there = content[:-1] + b"1"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.jsonl"
        if there is not None:
            file.write_bytes(there)
        restore_metrics(file, lines, said.append)
        assert (file.read_bytes() if file.exists() else b"") == content
    assert len(said) == (not (there or b"").startswith(content))


def test_a_checkpoint_of_an_older_version_is_refused_in_one_sentence_and_kept(tmp_path, monkeypatch):
    save = journal.save_checkpoint

    def save_as_before(folder, index, numbers, *rest):
        return save(folder, index, {key: value for key, value in numbers.items() if key != "format"}, *rest)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(journal, "save_checkpoint", save_as_before)
        run(KINDS["central"], tmp_path / "run", Watched(2))
    before = list_checkpoints(tmp_path / "run" / "checkpoints")
    with pytest.raises(FedsieveError, match="started by an older version of fedsieve. Resume it with that version"):
        resume(tmp_path / "run")
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == before


@pytest.mark.parametrize("kind", KINDS)
def test_equal_runs_leave_the_same_weight_files_to_the_byte(tmp_path, kind):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        run(KINDS[kind], folder, page=False)
    one, two = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.safetensors")} for folder in folders
    )
    assert one == two and len(one) > 0


@given(st.dictionaries(st.text(), st.text()), st.integers(0, 40))
def test_notes_come_back_and_tensors_stay_the_same(notes, size):
    tensors = {"b": torch.arange(size), "a": torch.zeros(3, dtype=torch.float16)}
    body = with_notes(safetensors.torch.save(tensors), notes)
    assert body == with_notes(safetensors.torch.save(tensors), dict(reversed(notes.items())))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "file").write_bytes(body)
        with safetensors.safe_open(Path(folder) / "file", "pt") as content:
            assert (content.metadata() or {}) == notes
    for name, tensor in safetensors.torch.load(body).items():
        assert torch.equal(tensor, tensors[name])
