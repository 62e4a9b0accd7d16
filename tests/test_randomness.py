import numpy as np

from fedsieve.randomness import generator


def test_an_address_gives_the_same_draws_for_ever():
    """Pinned: a change here changes every published run."""
    assert generator(0, "order", "head", 1).permutation(6).tolist() == [0, 1, 5, 3, 4, 2]
    np.testing.assert_array_equal(generator(7, "a", 1).random(5), generator(7, "a", 1).random(5))


def test_addresses_that_look_alike_are_apart():
    addresses = [
        (0, "a", 1),
        (0, "a", "1"),
        (0, "a", 1, 1),
        (1, "a", 1),
        (0, "b", 1),
        (0, "a, 1"),
        (0, "a", "b"),
        (0, "ab"),
    ]
    draws = {generator(*address).random() for address in addresses}
    assert len(draws) == len(addresses)
