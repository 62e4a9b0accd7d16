"""The masks of a stage: which one trains, what has moved, who holds what and who knows of it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federation.conftest import CONFIG

from fedsieve.config import Sieve, parse_config
from fedsieve.federation.maskbook import MaskBook, absolute, block_spans
from fedsieve.federation.memory import ClientMemory
from fedsieve.federation.state import MaskState
from fedsieve.mask.mask import Mask
from fedsieve.mask.overlap import block_of
from fedsieve.model.space import ParamSpace
from fedsieve.wire.codec import Coding

SPACE = ParamSpace(("blocks.0.a", "blocks.0.b", "blocks.1.a", "head.weight"), ((3, 4), (5,), (2, 6), (7,)))
STAGE = parse_config(CONFIG).stages[0]
bits = st.lists(st.booleans(), min_size=SPACE.size, max_size=SPACE.size).map(torch.tensor)


def mask(active):
    return Mask.from_bool(SPACE, active)


def book(sieve=None, state=None, folder=None, devices=(), densities=None):
    device = SimpleNamespace(density=1.0)
    people = SimpleNamespace(
        settings=SimpleNamespace(devices=devices),
        device=lambda client: SimpleNamespace(density=densities[client]) if densities else device,
    )
    context = SimpleNamespace(
        experiment=SimpleNamespace(mask_of=lambda stage: sieve),
        population=people,
        memory=ClientMemory(folder) if folder else None,
        model=torch.nn.Linear(1, 1),
    )
    theta = torch.arange(SPACE.size, dtype=torch.float32)
    return MaskBook(context, STAGE, SPACE, theta, state or MaskState())


def test_without_a_sieve_everything_trains_and_nothing_is_due():
    made = book()
    assert made.ready and made.mask is None and made.trains is SPACE and made.count == SPACE.size
    assert not made.due(0) and made.bits is None and list(made.introductions([], 0)) == []


@settings(max_examples=50)
@given(st.lists(bits, min_size=1, max_size=4))
def test_whatever_was_once_in_a_mask_has_moved(drawn):
    made = book(Sieve(rule="low_magnitude", refresh=1))
    for active in drawn:
        made.renew(mask(active), torch.zeros(SPACE.size))
    union = torch.stack(drawn).any(0)
    assert made.mask == mask(drawn[-1]) and made.moved == mask(union)
    assert made.support.tolist() == drawn[-1].nonzero().flatten().tolist()
    assert made.moved_index.tolist() == union.nonzero().flatten().tolist()
    assert made.state.generation == len(drawn)
    again = book(made.sieve, made.state)  # a resumed stage
    assert again.mask == made.mask and again.moved == made.moved and again.spans == made.spans


@settings(max_examples=50)
@given(bits, st.sampled_from(["fp32", "coo", "fp16", "int8"]))
def test_weights_arrive_where_they_belong_and_nowhere_else(active, form):
    made, coding = book(Sieve(rule="low_magnitude")), Coding(form)
    made.renew(mask(active), torch.zeros(SPACE.size))
    server = made.base + torch.where(active, 0.5, 0.0)
    theta = made.base.clone()
    made.lay(made.outgoing(server, coding), coding, theta)
    assert torch.equal(theta, server)
    assert torch.equal(made.taken(server), server[active])
    assert absolute(coding) == (form in ("fp32", "coo"))


@settings(max_examples=50)
@given(bits)
def test_spans_cover_the_trained_weights_block_by_block(active):
    support = active.nonzero().flatten()
    spans = block_spans(SPACE, support)
    owner = [
        block_of(SPACE.names[np.searchsorted(SPACE.offsets, place, side="right") - 1]) for place in support.tolist()
    ]
    told = [name for name, first, last in spans for _ in range(last - first)]
    assert told == owner
    assert all(first < last for _, first, last in spans)


def test_a_mask_is_due_first_and_then_every_so_many_rounds():
    made = book(Sieve(rule="low_magnitude", refresh=2))
    due = []
    for number in range(5):
        if made.due(number):
            due.append(number)
            made.renew(Mask.ones(SPACE), torch.zeros(SPACE.size))
    assert due == [0, 2, 4]
    assert not book(Sieve(scope="client")).due(0)


def test_clients_hear_of_a_mask_once_and_of_a_new_one_again():
    made = book(Sieve(rule="low_magnitude", refresh=1))
    first, second = torch.zeros(2, SPACE.size, dtype=torch.bool)
    first[:9], second[5:14] = True, True
    made.renew(mask(first), torch.zeros(SPACE.size))
    made.newcomers([3, 4])
    ((parcel, members),) = made.introductions([3, 4], 0)
    assert parcel.over == mask(first) and parcel.enclose and parcel.within is None and members == [3, 4]
    assert made.newcomers([4, 5]) == [5]
    assert [members for _, members in made.introductions([4, 5], 1)] == [[5]]
    made.renew(mask(second), torch.zeros(SPACE.size))
    told = list(made.introductions([3, 5], 2))
    assert [parcel.over for parcel, _ in told] == [mask(first | second), mask(second)]
    assert told[1][0].within == mask(first | second) and all(members == [3, 5] for _, members in told)


def test_a_mask_drawn_at_random_does_not_travel():
    made = book(Sieve(rule="random"))
    made.renew(Mask.ones(SPACE), torch.zeros(SPACE.size))
    made.newcomers([1])
    assert not made.travels and list(made.introductions([1], 0)) == []


def test_the_masks_of_clients_grow_what_has_moved_when_a_round_ends(tmp_path):
    made = book(Sieve(scope="client"), folder=tmp_path)
    assert made.moved == Mask.zeros(SPACE) and made.count == SPACE.size
    own = {client: torch.zeros(SPACE.size, dtype=torch.bool) for client in (1, 2)}
    own[1][:4], own[2][2:6] = True, True
    for client, active in own.items():
        assert made.encloses(client)
        made.keep_own(client, mask(active), 0)
        made.hear(client)
        assert not made.encloses(client) and made.moved == Mask.zeros(SPACE)
    made.grow()
    assert made.moved == mask(own[1] | own[2]) and torch.equal(made.bits, made.state.moved)
    assert torch.equal(made.holds([2, 1]), torch.stack([own[2], own[1]]))
    groups = [(members, over, places.tolist()) for members, over, places in made.groups([1, 2])]
    assert groups == [([1], mask(own[1]), [0, 1, 2, 3]), ([2], mask(own[2]), [2, 3, 4, 5])]
    made.forget(1)
    assert made.encloses(1)


def test_a_client_that_did_not_answer_is_told_again():
    made = book(Sieve(rule="low_magnitude"))
    made.renew(Mask.ones(SPACE), torch.zeros(SPACE.size))
    made.newcomers([1, 2])
    list(made.introductions([1, 2], 0))
    made.confirm(1)
    made.state.ahead = [1, 2]
    for client in (1, 2):
        made.doubt(client)
    assert made.state.known == {"1": 1} and made.state.ahead == []
    made.forget(1)
    made.doubt(1)
    assert made.state.known == {}


@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0), (1.0, 0.5, 0.25)])
def test_segments_give_every_weight_to_all_who_hold_it(monkeypatch, shares):
    """Nested tiers: the smaller a device, the fewer of the mask's weights it trains, all of them a larger one's too."""
    active = torch.zeros(SPACE.size, dtype=torch.bool)
    active[4:24] = True
    tiers = {}
    for share in (0.5, 0.25):
        part = torch.zeros(SPACE.size, dtype=torch.bool)
        part[4 : 4 + round(20 * share)] = True
        tiers[share] = mask(part)
    monkeypatch.setattr("fedsieve.federation.maskbook.nested_tiers", lambda *_: tiers)
    made = book(Sieve(rule="low_magnitude"), devices=[1], densities=dict(enumerate(shares)))
    made.renew(mask(active), torch.arange(SPACE.size, dtype=torch.float32))
    holders = {place: people for places, people in made.segments([0, 1, 2]) for place in places.tolist()}
    assert sorted(holders) == list(range(20))
    for place, people in holders.items():
        assert people == [client for client, share in enumerate(shares) if place < round(20 * share)]
    held = made.holds([0, 1, 2])
    if shares == (1.0, 1.0, 1.0):
        assert held is None
    else:
        assert held.sum(1).tolist() == [20, 10, 5]
        places = {members[0]: 20 if at is None else len(at) for members, _, at in made.groups([0, 1, 2])}
        assert places == {0: 20, 1: 10, 2: 5}
