"""A run killed at any moment ends, resumed, with the weights and metrics of one that was not."""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import safetensors.torch
import torch

from fedsieve.config import parse_config
from fedsieve.errors import FedsieveError
from fedsieve.runner.checkpoint import list_checkpoints
from fedsieve.runner.experiment import resume, run

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
processes.set_forkserver_preload(["fedsieve.runner.experiment", "timm", "datasets", "matplotlib", "sklearn.datasets"])


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
    monkeypatch.setattr("fedsieve.runner.shared.load_images", lambda *_: os.kill(os.getpid(), signal.SIGINT))
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
    from fedsieve.runner.experiment import _only_process

    run(tiny(), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with _only_process(tmp_path / "run"), pytest.raises(FedsieveError, match="another process"):
        resume(tmp_path / "run")
