"""Every benchmark in miniature, as a user calls it: that it works and is right. Times are never asserted."""

import itertools
import json
import os
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.end_to_end.test_command_line import fedsieve

from benchmarks import rounds as rounds_module
from benchmarks.commands import app
from benchmarks.limits import promise, training_flops
from benchmarks.memory import _try, host_bytes, memory, search
from benchmarks.options import read_numbers as _numbers
from benchmarks.peers import missing
from benchmarks.result import Incomplete, Stopped, alternate, shown
from benchmarks.rounds import SMALL, Case, PlainClient, flower_client, pfl_case
from benchmarks.wire import make_ways
from fedsieve.config import Model
from fedsieve.errors import FedsieveError
from fedsieve.federation.executors import Stacked
from fedsieve.files import write_json
from fedsieve.model.space import ParamSpace

CPU = torch.device("cpu")
NAMES = [command.name or command.callback.__name__ for command in app.registered_commands]
CASE = Case("vit_tiny_patch16_224", SMALL, 16, cohort=2, images=6, epochs=2)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "list"])
def test_every_benchmark_runs_in_miniature_and_writes_its_table(name, tmp_path, capsys):
    file = tmp_path / "result.json"
    assert fedsieve("bench", name, "--smoke", "--device", "cpu", "--out", file) == 0
    written = json.loads(file.read_text())
    assert written["benchmark"] == name
    assert written["rows"] and all(len(row) == len(written["columns"]) for row in written["rows"])
    assert written["limit"] and written["note"] and written["environment"]["torch"]
    printed = capsys.readouterr().out
    assert all(column.split()[0] in printed for column in written["columns"])
    assert all(f"{word}:" in printed for word in ("limits", "hardware", "versions"))


@pytest.mark.parametrize(
    "words",
    [
        "round --networks tiny --pixels 16 --cohorts 2 --ways plain,sequential --images 4 --epochs 1 --seconds 1 --together",
        "memory --network tiny --pixels 16 --cohorts 1,2 --sparsities 0,0.5 --at-most 2",
        "scale --clients 100 --cohorts 1 --repeats 1",
        "overhead --peers none --repeats 1",
    ],
)
def test_every_option_reaches_its_benchmark(words):
    assert fedsieve("bench", *words.split(), "--smoke", "--device", "cpu") == 0


def test_the_list_names_every_benchmark(capsys):
    assert fedsieve("bench", "list") == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert listed == set(NAMES) - {"list"}


@pytest.mark.parametrize(
    "words",
    [
        ("round", "--pixels", "64,x"),
        ("round", "--pixels", "8"),  # less than a patch
        ("round", "--cohorts", "2,00"),
        ("round", "--seconds", "nan"),
        ("round", "--ways", "plian"),
        ("round", "--ways", "stacked"),  # nothing to compare with
        ("round", "--seconds", "-1"),
        ("memory", "--network", "huge"),
        ("memory", "--network", "small,tiny"),  # which of them?
        ("memory", "--sparsities", "1.5"),
        ("memory", "--pixels", "17"),
        ("overhead", "--peers", "none,pfl"),
        ("start", "data.sise=3"),
        ("start", "device=cpu"),
        ("lst",),
        ("wire", "--device", "tpu"),
        ("wire", "--device", "meta"),
        ("wire", "--out", "/proc/result.json"),
        ("wire", "--out", "."),
    ],
)
def test_a_wrong_setting_is_answered_before_anything_is_measured(words, capsys):
    assert fedsieve("bench", *words, "--smoke") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_numbers_are_read_as_numbers():
    assert _numbers("--rates", "1e-3, 0.1,0.100", "", lambda rate: rate > 0, float) == (0.001, 0.1)


def test_what_is_no_regular_file_is_not_replaced_and_a_link_is_followed(tmp_path, capsys):
    pipe, link, target = tmp_path / "pipe", tmp_path / "link.json", tmp_path / "target.json"
    os.mkfifo(pipe)
    link.symlink_to(target)
    assert fedsieve("bench", "fuzz", "--smoke", "--out", pipe) == 2
    assert "no regular file" in capsys.readouterr().err and pipe.is_fifo()
    with pytest.raises(FileExistsError):
        write_json(pipe, {})
    write_json(link, {"new": 1})
    assert link.is_symlink() and json.loads(target.read_text()) == {"new": 1}


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt(), FedsieveError("stopped. `fedsieve resume /tmp/x` goes on", 130)]
)
def test_a_benchmark_that_is_stopped_says_so_and_nothing_of_folders_that_vanish(raised, monkeypatch, capsys):
    def stop(*_):
        raise raised

    monkeypatch.setattr("benchmarks.distributed.distributed", stop)
    assert fedsieve("bench", "distributed") == 130
    said = capsys.readouterr().err
    assert "bench distributed: stopped" in said and "resume" not in said


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("out of memory"), 1)])
def test_rows_that_are_there_are_shown_and_written_when_a_later_one_fails(raised, code, monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise raised

    file = tmp_path / "result.json"
    monkeypatch.setattr(rounds_module, "_beside", fail)
    assert fedsieve("bench", "round", "--smoke", "--ways", "plain,stacked", "--out", file) == code
    written, printed = json.loads(file.read_text()), capsys.readouterr()
    assert [row[3] for row in written["rows"]] == ["plain loop"] and written["smoke"] and written["incomplete"]
    assert "plain loop" in printed.out and "incomplete" in printed.out and "incomplete" in printed.err


# --- how times are taken ---------------------------------------------------------------------------------------------


def test_calls_take_turns():
    seen = []
    alternate({name: (lambda name=name: seen.append(name)) for name in "ab"}, CPU, repeats=2)
    assert seen == ["a", "b"] * 3


def test_no_further_turn_begins_when_time_is_up_but_everyone_had_one():
    seen = []
    alternate({name: (lambda name=name: seen.append(name)) for name in "ab"}, CPU, repeats=9, seconds=0, warm=True)
    assert seen == ["a", "b"]


@pytest.mark.parametrize("last", [3, 4])
def test_stopped_by_hand_whole_turns_are_kept(last, monkeypatch):
    calls = itertools.count()

    def timed(*_):
        if (number := next(calls)) > last:
            raise KeyboardInterrupt
        return float(number)

    monkeypatch.setattr("benchmarks.result.timed", timed)
    with pytest.raises(Stopped) as stopped:
        alternate({"a": int, "b": int}, CPU, repeats=9)
    assert stopped.value.medians.turns == 2 and stopped.value.medians == {"a": 1.0, "b": 2.0}


def test_stopped_before_all_had_a_turn_nothing_is_kept():
    with pytest.raises(KeyboardInterrupt) as stopped:
        alternate({"a": int, "b": interrupt}, CPU, repeats=9, warm=True)
    assert not isinstance(stopped.value, Stopped)


def interrupt():
    raise KeyboardInterrupt


def test_rounds_that_are_stopped_by_hand_show_the_turns_they_had(monkeypatch):
    taken = rounds_module.alternate

    def alternate(*arguments, **options):
        raise Stopped(taken(*arguments, **options))

    monkeypatch.setattr(rounds_module, "alternate", alternate)
    plan = replace(rounds_module.default_plan(CPU, smoke=True), ways=("plain", "sequential", "stacked"), together=True)
    with pytest.raises(Incomplete) as stopped:
        rounds_module.rounds(CPU, True, plan)
    assert [row[3] for row in stopped.value.result.rows] == ["plain loop", "fedsieve, one by one", "fedsieve, stacked"]


def test_numbers_are_written_with_three_digits_and_thousands_apart():
    cells = (None, "as it is", 1234567, 1234.5, 12.34, 1.234, 0.01234, 1.23e-7, 0.0)
    texts = ["-", "as it is", "1,234,567", "1,234", "12.3", "1.23", "0.012", "1.2e-07", "0.000"]
    assert [shown(cell) for cell in cells] == texts


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pixels", "width", "depth"), [(16, 48, 4), (32, 64, 2)])
def test_flops_are_those_of_a_vision_transformer_counted_by_hand(pixels, width, depth):
    options = {"patch_size": 4, "embed_dim": width, "depth": depth, "num_heads": 4}
    patches, classes = (pixels // 4) ** 2, 100
    tokens = patches + 1
    products = depth * (12 * tokens * width**2 + 2 * tokens**2 * width)  # qkv, proj and mlp; scores and their use
    embedding, head = patches * 48 * width, width * classes
    # Backward costs twice a product; images need no gradient, and neither does the frozen head's weight.
    expected = 2 * (3 * products + 2 * embedding + 2 * head)
    model = Model(backbone="vit_tiny_patch16_224", weights="none", options=options)
    assert training_flops(model, pixels, "backbone", classes) == expected


def test_a_gpu_that_is_not_in_the_table_has_no_data_sheet():
    assert promise("NVIDIA H200").product > promise("NVIDIA H100 PCIe").product
    assert promise("NVIDIA GeForce GTX 1080") is None and promise("NVIDIA GH200 480GB") is None


@pytest.mark.parametrize("together", [False, True])
def test_a_peer_that_fails_is_left_out_with_a_word(together, monkeypatch):
    opened = rounds_module.open_way

    def open_way(way, case, device):
        if way == "pfl":
            raise ImportError("no such thing")
        return opened(way, case, device)

    monkeypatch.setattr(rounds_module, "open_way", open_way)
    monkeypatch.setattr(rounds_module, "missing", lambda _: None)
    plan = replace(rounds_module.default_plan(CPU, smoke=True), ways=("plain", "pfl", "sequential"))
    result = rounds_module.rounds(CPU, True, replace(plan, together=together))
    assert [row[3] for row in result.rows] == ["plain loop", "fedsieve, one by one"]
    assert result.skipped == ["pfl, 16 px: failed, ImportError: no such thing"]
    for row in result.rows:
        rate, beside, ratio = row[4:7]
        assert rate / beside == pytest.approx(ratio)


def test_ways_that_are_measured_together_have_one_loop_beside_them():
    assert len(measured_beside(together=True)) == 1
    assert len(measured_beside(together=False)) == 3


def measured_beside(together):
    ways = ("plain", "sequential", "stacked")
    plan = replace(rounds_module.default_plan(CPU, smoke=True), ways=ways, together=together)
    rows = rounds_module.rounds(CPU, True, plan).rows
    assert [row[3] for row in rows] == ["plain loop", "fedsieve, one by one", "fedsieve, stacked"]
    return {row[5] for row in rows}


@pytest.mark.parametrize(("way", "at_once"), [("single-full", 1), ("stacked", 2)])
def test_clients_train_one_by_one_or_stacked_as_the_way_says(way, at_once, monkeypatch):
    made, build = [], Stacked._build

    def watch(self, clients):
        made.append(clients)
        build(self, clients)

    monkeypatch.setattr(Stacked, "_build", watch)
    with rounds_module.open_way(way, CASE, CPU) as step:
        step()
    assert made == [at_once]


@pytest.fixture
def no_rules(monkeypatch):
    """No layer can be stacked."""
    monkeypatch.setattr("fedsieve.model.scheme.rules", dict)


@pytest.mark.usefixtures("no_rules")
def test_a_round_that_was_not_stacked_is_not_shown_as_stacked():
    warned, refused = (
        pytest.warns(UserWarning, match="cannot be stacked"),
        pytest.raises(FedsieveError, match="not stacked"),
    )
    with rounds_module.open_way("stacked", CASE, CPU) as step, warned, refused:
        step()


# --- memory ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 90))
def test_the_search_finds_the_largest_that_fits(limit, most, guess):
    asked = []

    def fits(number):
        asked.append(number)
        return number <= limit

    assert search(fits, most, guess) == min(limit, most)
    assert max(asked) <= most and len(asked) == len(set(asked)) <= 14


def test_memory_that_a_call_takes_and_keeps_is_seen():
    kept = []
    found = host_bytes(lambda: kept.append(torch.ones(2**24)))  # 64 MiB
    if found is None:
        pytest.skip("this system does not tell what a process takes")
    peak, left = found
    assert peak > 2**25 and left > 2**25


@pytest.mark.usefixtures("no_rules")
def test_a_network_that_cannot_be_stacked_is_not_one_that_does_not_fit():
    with pytest.raises(FedsieveError, match="cannot be stacked"):
        _try("vit_tiny_patch16_224", SMALL, 16, 2, 4, 0.9, CPU)


# --- messages --------------------------------------------------------------------------------------------------------


def test_no_message_is_smaller_than_its_limit():
    """`bench wire` itself refuses messages that do not come back; this is about the limits it states."""
    space = ParamSpace(("a", "b"), ((300, 20), (2000,)))
    ways = make_ways(space, CPU)
    assert len(ways) >= 15
    for name, way in ways.items():
        if "zstd" not in name:  # whose values are not taken as incompressible
            assert len(way.write()) >= way.limit, name


# --- peers -----------------------------------------------------------------------------------------------------------


def weights(model):
    return ParamSpace.of(model).read(model)


def dense(client):
    """The same client without a mask, as other frameworks train."""
    client.mask = {name: torch.ones_like(mask) for name, mask in client.mask.items()}
    return client


def test_the_plain_loop_moves_only_masked_weights():
    client = PlainClient(CASE, CPU, "plain")
    before = {name: parameter.detach().clone() for name, parameter in client.trained.items()}
    client.train(0)
    moved = {name: parameter != before[name] for name, parameter in client.trained.items()}
    assert any(where.any() for where in moved.values())
    assert all(client.mask[name][where].all() for name, where in moved.items())


def test_what_a_flower_client_does_is_what_the_plain_loop_does():
    plain = dense(PlainClient(CASE, CPU, "plain"))
    start = [parameter.detach().numpy().copy() for parameter in plain.trained.values()]
    found, n = flower_client(CASE, "cpu", start, 1)
    assert n == plain.train(1) == CASE.images
    for mine, parameter in zip(found, plain.trained.values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), parameter.detach())


@pytest.mark.skipif(missing("pfl") is not None, reason="pfl is not installed")
def test_a_round_of_pfl_is_a_round_of_the_plain_loop():
    plain, model = dense(PlainClient(CASE, CPU, "plain")), CASE.network(CPU)
    plain.round()
    pfl_case(CASE, CPU, model)()
    torch.testing.assert_close(weights(model), weights(plain.model), atol=1e-6, rtol=1e-5)


def test_a_peer_that_cannot_be_imported_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'flwr[simulation]'" in missing("flower")


def test_what_memory_measured_is_kept_when_it_is_stopped(monkeypatch):
    tried = iter([(True, 1e6), (True, 1e6)])

    def attempt(*_):
        try:
            return next(tried)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("benchmarks.memory._try", attempt)
    with pytest.raises(Incomplete) as stopped:
        memory(CPU, True)
    assert len(stopped.value.result.rows) == 1
