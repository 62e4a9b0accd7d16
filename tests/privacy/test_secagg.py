import ast
import os
import pickle
import struct
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import xxhash
from Crypto.Protocol.SecretSharing import Shamir
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from fedsieve.errors import FedsieveError
from fedsieve.privacy import pads, secagg
from fedsieve.privacy.pads import add_pad, combine, split
from fedsieve.privacy.secagg import (
    HEADER,
    OVERHEAD,
    PHASES,
    SERVER,
    Aborted,
    SumClient,
    SumServer,
    _pair_pad,
    _self_pad,
    bytes_of,
    check_threshold,
    secure_sum,
    threshold_of,
)
from fedsieve.wire.bits import MessageError

REASONS = {
    "truncated", "magic", "version", "length", "checksum", "phase", "session", "round", "client", "duplicate", "count",
    "threshold", "participants", "key", "share",
}  # fmt: skip
ADVERTISE, SHARE, PAD, REVEAL = range(4)
SEED, KEY = 16, 32
VALUES = OVERHEAD + 16  # where the values begin in a message of phase 2


def inputs_of(clients, bits=16, count=20, seed=0) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {client: rng.integers(0, 2**bits, count, dtype=f"<u{bits // 8}") for client in clients}


class Play:
    """A secure sum that can be stopped in any phase, with everything that was sent: by phase and client."""

    def __init__(self, clients=(2, 3, 5, 7, 11), threshold=3, inputs=None) -> None:
        self.inputs = inputs or inputs_of(clients)
        self.clients = {client: SumClient(client, values, 0, threshold) for client, values in self.inputs.items()}
        first = next(iter(self.inputs.values()))
        self.server = SumServer(list(self.inputs), threshold, 8 * first.itemsize, len(first))
        self.down, self.up = [], []

    def ask(self) -> dict[int, bytes]:
        self.down.append(self.server.next())
        return self.down[-1]

    def answer(self, without=()) -> None:
        self.up.append({c: self.clients[c].reply(m) for c, m in self.down[-1].items() if c not in without})
        for client, message in self.up[-1].items():
            self.server.receive(client, message)

    def until(self, phase, drops=None) -> dict[int, bytes]:
        """The server's messages of a phase, nobody having answered them."""
        for now in range(phase):
            self.ask()
            self.answer([client for client, at in (drops or {}).items() if at <= now])
        return self.ask()


def reseal(message: bytes, body: bytes | None = None, **fields: int | bytes) -> bytes:
    """The message with another body or header, and the length and checksum that go with them."""
    names = ("magic", "version", "phase", "session", "round", "sender", "length")
    header = dict(zip(names, HEADER.unpack(message[: HEADER.size]), strict=True)) | fields
    body = message[OVERHEAD:] if body is None else body
    packed = HEADER.pack(*(header | {"length": OVERHEAD + len(body)}).values())
    return packed + struct.pack("<Q", xxhash.xxh3_64_intdigest(packed + body)) + body


def refused(reason: str):
    return pytest.raises(MessageError, check=lambda error: error.reason == reason)


def survivors_of(message: bytes) -> list[int]:
    return [client for (client,) in struct.iter_unpack("<I", message[OVERHEAD:])]


def request(message: bytes, survivors) -> bytes:
    return reseal(message, b"".join(struct.pack("<I", client) for client in survivors))


@st.composite
def cohorts(draw):
    clients = draw(st.lists(st.integers(0, SERVER - 1), min_size=3, max_size=9, unique=True))
    threshold = draw(st.integers(len(clients) // 2 + 1, len(clients)))
    drops = draw(st.dictionaries(st.sampled_from(clients), st.integers(0, 3)))
    return clients, threshold, drops


# --- sums ------------------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(cohorts(), st.sampled_from([16, 32, 64]), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_the_sum_is_exactly_the_survivors_or_there_is_none(cohort, bits, count, round):
    clients, threshold, drops = cohort
    inputs = inputs_of(clients, bits, count)
    answered = [sum(drops.get(client, 4) > phase for client in clients) for phase in range(4)]
    if min(answered) < threshold:
        with pytest.raises(Aborted) as aborted:
            secure_sum(inputs, threshold, drops, round)
        phase = next(phase for phase in range(4) if answered[phase] < threshold)
        assert (aborted.value.phase, aborted.value.answered) == (phase, answered[phase])
        assert PHASES[phase] in str(aborted.value) and str(threshold) in str(aborted.value)
        assert {sent.phase for sent in aborted.value.traffic} == set(PHASES[: phase + 1])
        return
    survivors, total, _ = secure_sum(inputs, threshold, drops, round)
    assert survivors == sorted(client for client in clients if drops.get(client, 4) > PAD)
    expected = sum(inputs[client].astype(object) for client in survivors) % 2**bits
    assert total.dtype == inputs[clients[0]].dtype and total.tolist() == expected.tolist()


def test_every_dropout_pattern_of_four_clients_gives_the_sum_or_an_abort():
    inputs = inputs_of(range(4), count=3)
    for code in range(5**4):
        drops = {client: code // 5**client % 5 for client in range(4)}
        left = sum(phase > REVEAL for phase in drops.values())
        try:
            survivors, total, _ = secure_sum(inputs, 3, drops)
        except Aborted:
            assert left < 3
        else:
            assert left >= 3 and survivors == [client for client in range(4) if drops[client] > PAD]
            assert (total == np.sum([inputs[client] for client in survivors], axis=0, dtype=np.uint16)).all()


def test_every_sum_is_exact_where_three_of_ten_are_lost_at_any_phase_in_every_round():
    rng, inputs = np.random.default_rng(0), inputs_of(range(10), 16, 5)
    for number in range(50):
        drops = dict(zip(rng.choice(10, 3, replace=False).tolist(), rng.integers(0, 4, 3).tolist(), strict=True))
        survivors, total, _ = secure_sum(inputs, 7, drops, number)
        assert survivors == [client for client in range(10) if drops.get(client, 4) > PAD]
        assert (total == np.sum([inputs[client] for client in survivors], axis=0, dtype=np.uint16)).all()


def test_whose_answer_is_refused_is_out_and_the_traffic_says_why():
    inputs = inputs_of(range(7))

    def deliver(client: int, phase: int, answer: bytes) -> bytes:
        if (client, phase) == (0, PAD):
            raise MessageError("late", "after the deadline")
        return answer[:-1] if (client, phase) in ((1, SHARE), (2, REVEAL)) else answer

    survivors, total, traffic = secure_sum(inputs, 4, deliver=deliver)
    assert survivors == [2, 3, 4, 5, 6]
    assert (total == np.sum([inputs[client] for client in survivors], axis=0, dtype=np.uint16)).all()
    refused = {(sent.client, sent.phase): sent.status for sent in traffic if sent.status != "ok"}
    assert refused == {(0, "pad"): "late", (1, "share"): "truncated", (2, "reveal"): "truncated"}


@given(st.integers(3, 400), st.integers(51, 100))
def test_a_share_is_always_a_threshold(clients, percent):
    threshold = threshold_of(percent / 100, clients)
    check_threshold(threshold, clients)
    assert percent * clients <= 100 * threshold < percent * clients + 200


def test_long_vectors_wrap_and_pads_cancel_across_chunks():
    inputs = {client: np.full(300_001, 2**16 - 1, np.uint16) for client in range(3)}
    survivors, total, _ = secure_sum(inputs, 2, {1: PAD})
    assert survivors == [0, 2] and (total == 2**16 - 2).all()


def test_the_traffic_is_every_message():
    play = Play(range(6), 4)
    play.until(4, {0: SHARE, 1: PAD})
    result = secure_sum(play.inputs, 4, {0: SHARE, 1: PAD})
    expected = [
        (client, way, PHASES[phase], len(message), "ok")
        for phase in range(4)
        for way, sent in (("down", play.down), ("up", play.up))
        for client, message in sent[phase].items()
    ]
    assert sorted(result.traffic) == sorted(expected)
    values = next(sent.size for sent in result.traffic if sent[1:3] == ("up", "pad"))
    assert values == VALUES + 40


@pytest.mark.parametrize(
    "bits, clients, drops", [(16, 10, {}), (32, 10, {1: SHARE, 4: PAD, 7: REVEAL}), (64, 24, {5: PAD})]
)
def test_an_upload_is_its_values_and_a_few_keys_for_each_peer(bits, clients, drops):
    count = 4000
    result = secure_sum(inputs_of(range(clients), bits, count), 7 * clients // 10, drops)
    for client in range(clients):
        up = sum(sent.size for sent in result.traffic if sent[:2] == (client, "up"))
        assert up <= count * bits // 8 + 4 * OVERHEAD + 120 * clients


@given(st.integers(3, 8), st.integers(0, 50), st.sampled_from([16, 32, 64]))
@settings(max_examples=10)
def test_what_a_sum_costs_is_known_before(clients, count, bits):
    traffic = secure_sum(inputs_of(range(clients), bits, count), clients).traffic
    sent = {way: sum(one.size for one in traffic if one[:2] == (0, way)) for way in ("up", "down")}
    assert (sent["up"], sent["down"]) == bytes_of(clients, count * bits // 8)


def test_clients_can_be_stored_between_messages():
    play = Play()
    for _ in range(4):
        play.ask()
        play.clients = pickle.loads(pickle.dumps(play.clients))
        play.answer()
    play.ask()
    assert (play.server.total == np.sum(list(play.inputs.values()), axis=0, dtype=np.uint16)).all()


@pytest.mark.parametrize("threshold, clients", [(1, 1), (2, 4), (5, 4), (0, 3), (1, 2), (-2, 3)])
def test_a_threshold_must_be_a_majority(threshold, clients):
    with pytest.raises(FedsieveError, match="threshold"):
        check_threshold(threshold, clients)


@pytest.mark.parametrize(
    "values", [np.zeros(3, np.uint8), np.zeros(3, np.int16), np.zeros((1, 3), np.uint16), np.ones(3)]
)
def test_only_vectors_of_unsigned_integers_are_summed(values):
    with pytest.raises(FedsieveError, match="secure sums are of"):
        SumClient(0, values)


def test_headers_hold_what_they_must():
    for clients, count, round in [([0, 1, SERVER], 1, 0), ([0, 1, 2], 2**31, 0), ([0, 1, 2], 1, 2**32)]:
        with pytest.raises(FedsieveError, match="header"):
            SumServer(clients, 2, 16, count, round)


# --- secrecy ---------------------------------------------------------------------------------------------------------


def uniform(data: bytes) -> bool:
    """Whether bytes look uniform: chi-squared, at a level that uniform bytes miss once in 5e8 times."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    statistic = float(((counts - len(data) / 256) ** 2 / (len(data) / 256)).sum())
    return chi2.ppf(1e-9, 255) < statistic < chi2.isf(1e-9, 255)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_one_clients_padded_values_are_uniform_and_unlike_anyone_elses(bits):
    inputs = {client: np.full(2**20 * 8 // bits, 7, f"<u{bits // 8}") for client in range(4)}
    play = Play(threshold=3, inputs=inputs)
    play.until(PAD)
    play.answer()
    bodies = [np.frombuffer(message[VALUES:], inputs[0].dtype) for message in play.up[PAD].values()]
    assert all(uniform(body.tobytes()) for body in bodies)
    for first, second in combinations(bodies, 2):  # equal values: sums and differences are those of the pads
        assert uniform((first - second).tobytes()) and uniform((first + second).tobytes())
    assert uniform((bodies[0] + bodies[1] + bodies[2]).tobytes())  # all pairs' pads but those with one


def what_is_left_of_pads() -> tuple[np.ndarray, np.ndarray]:
    """The padded values of a survivor and of one who came too late, less all pads that the server has learnt."""
    play = Play(inputs={client: np.full(2**19, client, np.uint16) for client in range(5)})
    play.until(REVEAL, {3: PAD, 4: PAD})
    late, (seed, key) = play.clients[3].reply(play.down[PAD][3]), (play.clients[3].seed, play.clients[0].pad_key)
    play.answer()
    play.ask()
    assert (play.server.total == 0 + 1 + 2).all()
    told = {name: combine(dict(list(shares.items())[:3])) for name, shares in plaintext_shares(play).items()}
    assert told.keys() == {(0, "seed"), (1, "seed"), (2, "seed"), (3, "key"), (4, "key")}

    def take_off(values: np.ndarray, owner: int, peer: int, key: bytes, of: int) -> None:
        """Take the pad of a pair off its owner's values, with the private key of one of the two."""
        other = peer if of == owner else owner
        pad = _pair_pad(key, play.server.keys[other][KEY:], play.server.binding, owner, peer)
        add_pad(values, pad, -1 if owner < peer else 1)

    survivor = np.frombuffer(play.up[PAD][0][VALUES:], np.uint16).copy()
    add_pad(survivor, _self_pad(told[0, "seed"], play.server.binding, 0), -1)
    for peer in (3, 4):
        take_off(survivor, 0, peer, told[peer, "key"], of=peer)
    hidden = survivor.copy()
    for peer in (1, 2):
        take_off(survivor, 0, peer, key, of=0)
    assert (survivor == 0).all()

    latecomer = np.frombuffer(late[VALUES:], np.uint16).copy()
    for peer in (0, 1, 2, 4):
        take_off(latecomer, 3, peer, told[3, "key"], of=3)
    hidden_late = latecomer.copy()
    add_pad(latecomer, _self_pad(seed, play.server.binding, 3), -1)
    assert (latecomer == 3).all()
    return hidden, hidden_late


def test_all_that_a_server_is_told_still_hides_survivors_and_those_who_come_too_late():
    # What hides the first are pads with other survivors, and the second its self-pad: each other in every session.
    for first, second in zip(what_is_left_of_pads(), what_is_left_of_pads(), strict=True):
        assert uniform(first.tobytes()) and uniform(second.tobytes()) and uniform((first - second).tobytes())


def secrets_of(play) -> list[bytes]:
    """Everything that could remove a pad: the keys of pads, and the secrets they are derived from."""
    found, binding = [], play.server.binding
    for client in play.clients.values():
        found += [client.seed, client.pad_key, client.share_key, _self_pad(client.seed, binding, client.id)]
        found += [secret for peer, secret in client.secrets.items() if client.id < peer]
        found += [
            _pair_pad(client.pad_key, key, binding, client.id, peer)
            for peer, key in client.keys.items()
            if client.id < peer
        ]
    return found


def test_no_message_before_the_last_phase_contains_a_secret():
    play = Play()
    play.until(REVEAL, {11: PAD})
    sent = [message for messages in (*play.down, *play.up) for message in messages.values()]
    secrets = secrets_of(play)
    assert len(secrets) == 5 * 4 + 10 * 2
    assert not [secret for secret in secrets for message in sent if secret in message]


def test_secrets_are_fresh_for_every_client_and_session():
    plays = [Play(), Play()]
    for play in plays:
        play.until(REVEAL)
    secrets = [secret for play in plays for secret in secrets_of(play)]
    assert len(set(secrets)) == len(secrets)


def test_the_same_inputs_give_other_bytes_and_the_same_sum():
    plays = [Play(), Play()]
    for play in plays:
        play.until(4)
    first, second = plays
    assert (first.server.total == second.server.total).all()
    for phase in range(4):
        assert all(first.up[phase][client] != second.up[phase][client] for client in first.clients)
    for client in first.clients:
        pads = [np.frombuffer(play.up[PAD][client][VALUES:], np.uint16) for play in plays]
        assert (pads[0] != pads[1]).mean() > 0.5


@pytest.mark.parametrize("module", [pads, secagg])
def test_secrets_never_come_from_the_experiments_seed(module):
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [node.attr] if isinstance(node, ast.Attribute) else []
        assert not [name for name in names if "random" in name and name != "urandom"]


def plaintext_shares(play) -> dict[tuple[int, str], dict[int, bytes]]:
    """All shares that the server was given in the clear: of whose secret, by the index of the share."""
    places = {client: 1 + place for place, client in enumerate(sorted(play.up[ADVERTISE]))}
    shares: dict[tuple[int, str], dict[int, bytes]] = {}
    if len(play.up) > REVEAL:
        survivors = survivors_of(next(iter(play.down[REVEAL].values())))
        for helper, message in play.up[REVEAL].items():
            at = OVERHEAD
            for client in sorted(play.up[SHARE]):
                what, size = ("seed", SEED) if client in survivors else ("key", KEY)
                shares.setdefault((client, what), {})[places[helper]] = message[at : at + size]
                at += size
    return shares


@settings(max_examples=40, deadline=None)
@given(cohorts())
def test_the_server_of_an_aborted_sum_cannot_put_any_secret_together(cohort):
    clients, threshold, drops = cohort
    play = Play(clients, threshold)
    secrets: dict[tuple[int, str], bytes] = {}
    try:
        for phase in range(4):
            play.ask()
            play.answer([client for client, at in drops.items() if at <= phase])
            if phase == SHARE:
                secrets = {
                    (client.id, what): secret
                    for client in play.clients.values()
                    for what, secret in (("seed", client.seed), ("key", client.pad_key))
                }
        play.ask()
    except Aborted:
        assert play.server.total is None
        for name, shares in plaintext_shares(play).items():
            assert len(shares) < threshold
            assert combine(shares) != secrets[name]
        for message in play.up[-1].values():
            with pytest.raises(MessageError):
                play.server.receive(next(iter(play.clients)), message)
        with pytest.raises(FedsieveError, match="over"):
            play.ask()
    else:
        shares = plaintext_shares(play)
        assert not {client for client, what in shares if what == "seed"} & {c for c, what in shares if what == "key"}
        assert all(combine(dict(list(some.items())[-threshold:])) == secrets[name] for name, some in shares.items())


@pytest.mark.parametrize("length", [SEED, KEY])
@pytest.mark.parametrize("threshold, count", [(2, 3), (4, 5), (3, 3)])
def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not(length, threshold, count):
    secret = os.urandom(length)
    shares = dict(enumerate(split(secret, threshold, count), 1))
    for some in combinations(shares.items(), threshold):
        assert combine(dict(some)) == secret
    for some in combinations(shares.items(), threshold - 1):
        assert combine(dict(some)) != secret


@settings(max_examples=30, deadline=None)
@given(st.data(), st.binary(min_size=16, max_size=16), st.integers(2, 12))
def test_shares_are_those_of_pycryptodome(data, secret, count):
    threshold = data.draw(st.integers(2, count))
    chosen = data.draw(st.permutations(range(1, count + 1)))[:threshold]
    ours = split(secret, threshold, count)
    assert Shamir.combine([(index, ours[index - 1]) for index in chosen], False) == secret
    theirs = dict(Shamir.split(threshold, count, secret, False))
    assert combine({index: theirs[index] for index in chosen}) == secret


# --- hostile servers -------------------------------------------------------------------------------------------------


def test_no_client_ever_reveals_both_shares_of_a_peer():
    play = Play()
    messages = play.until(REVEAL)
    everyone = list(play.clients)
    first, second = request(messages[2], everyone), request(messages[2], [2, 3, 5])
    answer = play.clients[2].reply(first)
    assert len(answer) == OVERHEAD + 5 * SEED
    for again in (first, second):
        with refused("phase"):
            play.clients[2].reply(again)
    with refused("phase"):  # not even a phase that does not exist
        play.clients[2].reply(reseal(second, phase=4))
    assert play.clients[2].shares == {} and play.clients[2].pad_key == b""
    assert len(play.clients[3].reply(second)) == OVERHEAD + 3 * SEED + 2 * KEY


@pytest.mark.parametrize(
    "survivors, reason",
    [
        ([], "threshold"),
        ([2, 3], "threshold"),
        ([3, 5, 7], "participants"),  # not the client that is asked
        ([2, 3, 5, 9], "participants"),  # a stranger
        ([2, 3, 5, 13], "participants"),  # a client that gave out no shares
        ([2, 2, 3, 5], "participants"),  # twice, which could ask for both
        ([2, 5, 3], "participants"),
    ],
)
def test_requests_that_contradict_what_a_client_saw_are_refused(survivors, reason):
    play = Play((2, 3, 5, 7, 13), 3)
    message = play.until(REVEAL, {13: SHARE})[2]
    with refused(reason):
        play.clients[2].reply(request(message, survivors))
    assert len(play.clients[2].reply(message)) == OVERHEAD + 4 * SEED  # nothing was lost


def test_lists_of_keys_are_checked():
    play = Play()
    message = play.until(SHARE)[2]
    rows = [message[at : at + 68] for at in range(OVERHEAD, len(message), 68)]
    stranger = struct.pack("<I", 12) + os.urandom(64)
    for changed, reason in [
        (rows[1:], "key"),  # without this client
        ([rows[0][:4] + rows[1][4:], *rows[1:]], "key"),  # with keys it did not send
        ([*rows[:4], rows[4][:4] + rows[3][4:]], "key"),  # keys of another
        ([*rows[:4], rows[4][:4] + bytes(32) + rows[4][36:]], "key"),  # a point of small order
        (rows[:2], "threshold"),
        ([*rows, stranger], "threshold"),  # 3 of 6 are no majority
        (rows[::-1], "participants"),
        ([*rows[:3], rows[2]], "participants"),
    ]:
        with refused(reason):
            play.clients[2].reply(reseal(message, b"".join(changed)))
    with refused("length"):
        play.clients[2].reply(reseal(message, message[OVERHEAD:-1]))
    play.clients[2].reply(message)


def test_terms_are_checked():
    play = Play()
    message = play.until(ADVERTISE)[2]
    for terms, reason in [((2, 2, 20), "threshold"), ((3, 4, 20), "count"), ((3, 2, 21), "count")]:
        with refused(reason):
            play.clients[2].reply(reseal(message, struct.pack("<IBI", *terms)))
    with refused("length"):
        play.clients[2].reply(reseal(message, b""))


def test_shares_for_another_client_or_by_another_are_refused():
    play = Play()
    messages = play.until(PAD)
    mine, other = messages[2], messages[3]
    size = (len(mine) - OVERHEAD) // 4
    rows = [mine[at : at + size] for at in range(OVERHEAD, len(mine), size)]
    for changed, reason in [
        ([rows[0][:4] + rows[1][4:], *rows[1:]], "share"),
        ([other[OVERHEAD + size :][:4] + other[OVERHEAD + size :][4:size], *rows[2:]], "share"),
        (rows[:1], "threshold"),
        ([struct.pack("<I", 1) + rows[0][4:], *rows[1:]], "participants"),
        ([*rows, rows[-1]], "participants"),
    ]:
        with refused(reason):
            play.clients[2].reply(reseal(mine, b"".join(changed)))
    play.clients[2].reply(mine)


def test_clients_that_were_shown_different_lists_do_not_understand_each_other():
    play = Play()
    message = play.until(SHARE)[2]
    shorter = reseal(message, message[OVERHEAD:-68])
    for client, sent in play.down[SHARE].items():
        answer = play.clients[client].reply(shorter if client == 2 else sent)
        if client == 2:
            with refused("length"):
                play.server.receive(client, answer)
            answer = reseal(answer, answer[OVERHEAD:] + bytes(76))
        play.server.receive(client, answer)
    for client, sent in play.ask().items():
        with refused("participants" if client == 2 else "share"):
            play.clients[client].reply(sent)


def test_values_that_were_padded_for_others_than_those_who_take_part_are_refused():
    play = Play()
    message = play.until(PAD)[2]
    size = (len(message) - OVERHEAD) // 4
    answer = play.clients[2].reply(reseal(message, message[OVERHEAD:-size]))  # on the way one peer's share was lost
    with refused("participants"):
        play.server.receive(2, answer)


# --- messages --------------------------------------------------------------------------------------------------------


def test_messages_of_other_sessions_rounds_phases_and_clients_are_refused():
    play, other = Play(), Play()
    for phase in range(4):
        messages, foreign = play.ask(), other.ask()
        message = messages[2]
        if phase:
            with refused("session"):
                play.clients[2].reply(foreign[2])
            with refused("phase"):
                play.clients[2].reply(play.down[phase - 1][2])
            with refused("phase"):
                play.server.receive(2, play.up[phase - 1][2])
        with refused("round"):
            play.clients[2].reply(reseal(message, round=1))
        with refused("client"):
            play.clients[2].reply(reseal(message, sender=3))
        play.answer()
        other.answer()
        answer = play.up[phase][2]
        with refused("duplicate"):
            play.server.receive(2, answer)
        with refused("client"):
            play.server.receive(3, answer)
        with refused("client"):
            play.server.receive(99, reseal(answer, sender=99))
        with refused("session"):
            play.server.receive(2, other.up[phase][2])
        with refused("phase"):
            play.clients[2].reply(message)
        with refused("version"):
            play.clients[2].reply(reseal(message, version=2))
        with refused("magic"):
            play.clients[2].reply(reseal(message, magic=b"fsv"))
    play.ask()
    assert (play.server.total == np.sum(list(play.inputs.values()), axis=0, dtype=np.uint16)).all()
    for phase in range(5):
        with refused("phase"):
            play.server.receive(2, reseal(play.up[REVEAL][2], phase=phase))


def test_truncated_and_flipped_messages_are_refused_at_every_place():
    play = Play((0, 1, 2), 2, {client: np.zeros(4, np.uint16) for client in range(3)})
    for _ in range(4):
        sent = play.ask()[0]
        bad = [sent[:cut] for cut in range(len(sent))] + [sent + b"\0"]
        for place in range(8 * len(sent)):
            flipped = bytearray(sent)
            flipped[place // 8] ^= 1 << place % 8
            bad.append(bytes(flipped))
        for message in bad:
            with pytest.raises(MessageError) as error:
                play.clients[0].reply(message)
            assert error.value.reason in REASONS
            with pytest.raises(MessageError):
                play.server.receive(0, message)
        play.answer()
    play.ask()
    assert not play.server.total.any()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 3), st.data())
def test_garbage_is_refused_with_a_reason_or_taken_but_never_crashes(phase, data):
    play = Play((0, 1, 2), 2)
    down = play.until(phase)[0]
    up = play.clients[0].reply(down)
    for message, take in ((down, play.clients[1].reply), (up, lambda bad: play.server.receive(0, bad))):
        body = bytearray(message[OVERHEAD:])
        for place in data.draw(st.lists(st.integers(0, max(0, len(body) - 1)), max_size=3)):
            body[place] ^= data.draw(st.integers(1, 255))
        bad = data.draw(
            st.sampled_from([bytes(body), bytes(body[: data.draw(st.integers(0, len(body)))]), bytes(body) * 2])
            | st.binary(max_size=300)
        )
        bad = data.draw(st.sampled_from([reseal(message, bad), bad]))
        try:
            take(bad)
        except MessageError as error:
            assert error.reason in REASONS


def test_wrong_shares_end_the_sum_instead_of_spoiling_it():
    for drops in ({}, {11: PAD}):
        play = Play()
        play.until(REVEAL, drops)
        for client, message in play.down[REVEAL].items():
            answer = play.clients[client].reply(message)
            if client == 3:  # the last share is of a seed, or of a key
                answer = reseal(answer, answer[OVERHEAD:-1] + bytes([answer[-1] ^ 1]))
            play.server.receive(client, answer)
        with pytest.raises(Aborted, match="client 11's (seed|key)"):
            play.ask()
        assert play.server.total is None
