import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.report.conftest import SPACE, drawn_mask

from fedsieve.report.folder import read_masks, read_run
from fedsieve.report.traffic import inverse, of_dense, read_traffic, so_far
from fedsieve.wire.bits import entropy
from fedsieve.wire.codec import OVERHEAD, Coding, encode, limit_bytes
from fedsieve.wire.ledger import Ledger, Line, totals
from fedsieve.wire.values import BITS

FORMATS = ("fp32", "bf16", "fp16", "int8", "int4", "sign", "coo")


def traffic_of(folder):
    run, damage = read_run(folder), []
    found = read_traffic(run, read_masks(run, damage))
    assert not run.problems and not damage
    return {part.stage: part for part in found}


def kinds(part):
    return {(kind.direction, kind.what): kind for kind in part.kinds}


def test_bytes_by_round_are_the_ledgers(make_federated):
    folder = make_federated()
    found = traffic_of(folder)
    for stage, (up, down) in totals(folder / "ledger.csv").items():
        assert (found[stage].up.tolist(), found[stage].down.tolist()) == (up.tolist(), down.tolist())
        assert sum(kind.bytes for kind in found[stage].kinds) == up.sum() + down.sum() == found[stage].total


def test_dense_is_the_same_messages_with_all_weights_in_four_bytes(make_federated):
    run = read_run(make_federated())
    head, backbone = read_traffic(run)
    assert head.dense_total == (6 + 6) * 4 * 40  # a closed-form head is beside one that is sent both ways
    assert backbone.dense_total == (4 * 3 + 4 * 3 - 1) * 4 * SPACE.size  # what never came back is not counted
    sent = sum(run.messages[key] * key[-1] for key in run.messages)
    assert of_dense([head, backbone]) == sent / (head.dense_total + backbone.dense_total)
    assert backbone.per_client == backbone.bytes_up / 11 + backbone.bytes_down / 12


@pytest.mark.parametrize("up", FORMATS)
def test_weights_and_limits_leave_out_headers_scales_and_indices(make_federated, up):
    down = "fp16" if up == "sign" else up
    backbone = traffic_of(make_federated(message={"up": up, "down": down}))["backbone"]
    mask, found = drawn_mask(0), kinds(backbone)
    assert found["up", "update"].weights == 11 * mask.count
    assert found["up", "update"].limit == 11 * limit_bytes(mask, BITS[up], False) < found["up", "update"].bytes
    assert found["down", "model"].limit == 12 * limit_bytes(mask, BITS[down], False)
    assert backbone.weights == (11 + 12) * mask.count and backbone.dense_weights == (11 + 12) * SPACE.size
    assert backbone.limit_up.sum() == found["up", "update"].limit


def test_with_top_k_only_what_is_sent_counts_and_its_places_have_a_price(make_federated):
    found = kinds(traffic_of(make_federated(message={"up": "int8", "top_k": 0.25}))["backbone"])
    k = drawn_mask(0).count
    assert found["up", "update"].weights == 11 * round(0.25 * k)
    bits = 8 * round(0.25 * k) + entropy([round(0.25 * k)], [k])
    assert found["up", "update"].limit == pytest.approx(11 * bits / 8)
    assert found["down", "model"].weights == 12 * k


def test_a_server_with_new_masks_sends_all_weights_that_ever_moved(make_federated):
    masks = {1: drawn_mask(0), 3: drawn_mask(1, 0.2)}
    found = kinds(traffic_of(make_federated(masks=masks, mask={"sparsity": 0.9, "refresh": 2}))["backbone"])
    assert found["up", "update"].weights == 5 * masks[1].count + 6 * masks[3].count
    assert found["down", "model"].weights == 6 * masks[1].count + 6 * (masks[1] | masks[3]).count


def test_an_enclosed_mask_is_no_weights(make_federated):
    folder = make_federated(masks={}, mask={"sparsity": 0.9, "scope": "client"}, message={"up": "int8"})
    own = {client: drawn_mask(client) for client in range(3)}
    ledger = Ledger(folder / "ledger.csv")
    for client, mask in own.items():
        mask.save(folder / "masks" / f"backbone.client-{client}.safetensors")
        for number in range(2):
            values = torch.randn(mask.count)
            message = encode(values, Coding("int8"), mask, round=number, client=client, enclose=number == 0)
            ledger.add(Line("backbone", number + 1, client, "up", "update", len(message)))
        ledger.add(Line("backbone", 2, client, "down", "model", OVERHEAD + 4 * 77))
    ledger.close()
    found = kinds(traffic_of(folder)["backbone"])
    sizes = [mask.count for mask in own.values()]
    assert found["up", "update"].weights == sum(sizes) + 3 * round(np.mean(sizes))
    assert found["down", "model"].weights == 3 * 77


@given(st.sampled_from([name for name in FORMATS if name != "coo"]), st.integers(0, 10**6), st.sampled_from([8, 64]))
def test_a_size_gives_back_the_number_of_values(format, k, group):
    coding = Coding(format, group)
    found = inverse(coding.size(k), coding)
    assert k <= found < k + 8 / BITS[format] and coding.size(found) == coding.size(k)


def test_a_size_that_no_number_of_values_has_is_none():
    assert inverse(5, Coding("fp32")) is None and inverse(-3, Coding("fp32")) is None


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_without_a_ledger_the_records_count(make_federated, damage):
    folder = make_federated()
    if damage == "missing":
        (folder / "ledger.csv").unlink()
    else:
        text = (folder / "ledger.csv").read_text().replace("backbone,1,", "backbone,?,", 1)
        (folder / "ledger.csv").write_text(text)
    run = read_run(folder)
    assert [problem.split(":")[0] for problem in run.problems] == ["ledger.csv is damaged"] * (damage == "torn")
    (backbone,) = read_traffic(run)
    assert backbone.up.tolist() == [111] * 4 and backbone.down.tolist() == [222] * 4 and not backbone.counted
    assert backbone.sent_up.tolist() == [3, 2, 3, 3] and backbone.sent_down.tolist() == [3] * 4
    assert so_far(run.records, [backbone]).tolist() == [0, 333, 666, 999, 1332]


def test_a_central_run_sends_nothing(make_run):
    assert read_traffic(read_run(make_run("run"))) == [] and of_dense([]) is None


def test_the_size_of_a_dense_stage_is_read_from_its_messages_while_it_runs(make_federated):
    folder = make_federated(finished=False)
    config = (folder / "config.yaml").read_text().replace("sparse: true", "sparse: false")
    start = config.index("\nmask:")
    config = config[:start] + "\nmask: null" + config[config.index("\nfederation:") :]
    (folder / "config.yaml").write_text(config)
    (folder / "masks" / "backbone.safetensors").unlink()
    message = encode(torch.ones(SPACE.size), Coding("fp32"), SPACE, round=0, client=0)
    with Ledger(folder / "ledger.csv")._file as file:
        file.write(f"backbone,1,0,up,update,{len(message)},ok\n".encode())
    assert traffic_of(folder)["backbone"].dense == 4 * SPACE.size
