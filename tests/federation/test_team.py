"""How clients are dealt to ranks, and in which order their answers come back. Real processes: tests/end_to_end/test_distributed.py."""

import itertools
import queue
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.federation import team as module
from fedsieve.federation.team import Desk, Pace, Request, Split, Team, _Answer, deal

COSTS = st.lists(st.integers(0, 50), max_size=12)


@given(COSTS, st.integers(1, 5), st.floats(0, 100))
def test_every_client_is_dealt_once_and_ranks_keep_the_order_of_the_cohort(costs, ranks, beside):
    shares = deal(costs, ranks, beside)
    assert len(shares) == ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_the_slowest_rank_is_at_most_a_third_slower_than_need_be(costs, ranks):
    """Against the best of all ways to deal them."""
    ways = itertools.product(range(ranks), repeat=len(costs))
    best = min(
        max(sum(c for c, r in zip(costs, way, strict=True) if r == rank) for rank in range(ranks)) for way in ways
    )
    slowest = max(sum(costs[place] for place in share) for share in deal(costs, ranks))
    assert slowest <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


@given(COSTS, st.integers(1, 4))
def test_no_rank_takes_more_than_it_can_stack(costs, ranks):
    most = max(1, -(-len(costs) // ranks))
    shares = deal(costs, ranks, most=most)
    assert max(map(len, shares)) <= most
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))


def test_rank_0_takes_less_where_it_has_more_to_do():
    assert [len(share) for share in deal([1] * 10, 2)] == [5, 5]
    assert [len(share) for share in deal([1] * 10, 2, beside=4)] == [3, 7]
    assert [len(share) for share in deal([1] * 10, 2, beside=40)] == [0, 10]


@dataclass(frozen=True)
class Square(Request):
    places: list[int]
    log: list[int]

    def perform(self, desk):
        self.log.extend(self.places)
        for first in range(0, len(self.places), 2):  # two at a time, as an executor may
            part = torch.tensor(self.places[first : first + 2])
            yield part**2, None


class Desks(Team):
    """Ranks that answer at once, in this process."""

    def __init__(self, size):
        self.size, self.others, self.lost = size, list(range(1, size)), None
        self.inbox, self.desk = queue.SimpleQueue(), Desk(None, None, None, "eager", 0)

    def _send(self, to, request):
        for batch in request.perform(self.desk):
            self.inbox.put((to, _Answer(()), list(batch), []))


@given(
    st.lists(st.integers(0, 50), max_size=150),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([0, 500, 10**6]),
)
def test_answers_come_in_order_and_few_wait_for_their_turn(costs, ranks, group, several, ahead):
    begun, given_back, pace = [], [], Pace(30.0)
    chunk, together = group * -(-8 // group), group * ranks * several
    most = max(2 * (group + chunk * (ranks - 1)), ahead // 10) + chunk * ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "AHEAD", ahead)
        for places, (values, nothing) in Desks(ranks).spread(
            costs, lambda places: Square(places, begun), 10, Split(group, together, pace=pace)
        ):
            assert values.tolist() == [place**2 for place in places] and nothing is None
            assert len(places) == together or places.stop == len(costs)
            assert len(begun) - len(given_back) <= most
            given_back += places
    assert given_back == list(range(len(costs)))
    assert sorted(begun) == given_back
    assert pace.beside >= 0
