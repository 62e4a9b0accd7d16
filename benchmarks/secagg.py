"""What a secure sum costs: seconds and bytes of whole rounds, all parties in one process; beside Flower's SecAgg+."""

import copy
import importlib.metadata
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from benchmarks.result import Result, columns
from fedsieve.flower import QUIET
from fedsieve.privacy.fixed_point import FixedPoint
from fedsieve.privacy.secagg import PHASES, secure_sum

BOUND, WEIGHT = 1.0, 500  # of |value| and of a client's weight
PAD = PHASES.index("pad")
FLOWER = "Flower's SecAgg+"


class Round(NamedTuple):
    """One secure weighted mean: what it took, the most that a client sent, and the largest error of the mean."""

    seconds: float
    bytes_up: int
    error: float


def secagg(device: torch.device, smoke: bool) -> Result:
    """Weighted means of 2.2 million values, from encoding them to decoding their sum, with and without dropouts."""
    result = Result(
        columns(
            "clients | values | lost | how | seconds a round | times Flower's seconds | upload, MB | times the "
            "values | largest error"
        ),
        note="Values within 1, weights to 500, threshold 2/3. Uploads are those of one client, all phases; `times the values` is "
        "by their own width. Lost clients vanish at phases drawn at random. Flower's masks are drawn from 32 bits of the agreed "
        f"key (numpy's RandomState), which is quick and can be guessed; its clients vanish after they dealt their shares. {_flower_version()}",
        limit=_cipher(),
    )
    count = 2_000 if smoke else 2_200_000
    rng = np.random.default_rng(0)
    for clients in (4,) if smoke else (10, 100):
        values = {client: rng.uniform(-BOUND, BOUND, count).astype(np.float32) for client in range(clients)}
        weights = {client: int(rng.integers(1, WEIGHT + 1)) for client in range(clients)}
        threshold = 2 * clients // 3 + 1
        cases: dict[tuple[int, str, int], Callable[[], Round]] = {}
        for bits in (16, 32) if clients < 100 else (16,):
            for lost in (0, clients // 4):
                gone = rng.choice(clients, lost, replace=False).tolist()
                drops = {client: int(rng.integers(len(PHASES))) for client in gone}
                cases[lost, f"secagg, {bits} bits", bits] = partial(_ours, values, weights, bits, threshold, drops)
                if bits == 32 and not _flower_version().startswith("Flower is not"):
                    later = {client: max(phase, PAD) for client, phase in drops.items()}
                    cases[lost, FLOWER, 32] = partial(_flower, values, weights, threshold, later)
        turns = [[call() for call in cases.values()] for _ in range(3 if clients < 100 and not smoke else 1)]
        middle = {
            case: sorted(found)[len(found) // 2] for case, *found in zip(cases, *turns, strict=True)
        }  # by seconds
        for (lost, how, bits), found in middle.items():
            flower = middle.get((lost, FLOWER, 32))
            result.rows.append(_row(clients, count, lost, how, bits, found, flower))
    result.rows.append(_endurance(4 if smoke else 10, count, 3 if smoke else 50))
    return result


def _cipher() -> str:
    """What bounds a sum: every client draws a pad as long as its values for every other."""
    size = 2**24
    stream = Cipher(AES(os.urandom(16)), CTR(bytes(16))).encryptor()
    began = time.perf_counter()
    stream.update(bytes(size))
    rate = size / (time.perf_counter() - began)
    return f"n clients draw n^2 pads, each as long as their values, with AES-CTR: {rate / 1e9:.2f} GB/s on one core in this run"


def _row(
    clients: int, count: int, lost: int, how: str, bits: int, found: Round, flower: Round | None = None
) -> tuple[Any, ...]:
    slower = found.seconds / flower.seconds if flower else None
    ratio = found.bytes_up / (count * bits // 8)
    return clients, count, lost, how, found.seconds, slower, found.bytes_up / 1e6, ratio, found.error


def _ours(
    values: Mapping[int, np.ndarray],
    weights: Mapping[int, int],
    bits: int,
    threshold: int,
    drops: Mapping[int, int],
) -> Round:
    began = time.perf_counter()
    point = FixedPoint(bits, len(values), BOUND * WEIGHT, WEIGHT)
    inputs = {client: point.encode(row, weights[client]) for client, row in values.items()}
    survivors, total, traffic = secure_sum(inputs, threshold, drops)
    sums, weight = point.decode(total)
    seconds = time.perf_counter() - began
    up = [sum(sent.size for sent in traffic if sent[:2] == (client, "up")) for client in survivors]
    return Round(seconds, max(up), _error(sums / weight, values, weights, survivors))


def _error(mean: np.ndarray, values: Mapping[int, np.ndarray], weights: Mapping[int, int], clients: list[int]) -> float:
    plain = sum(weights[client] * values[client].astype(np.float64) for client in clients)
    return float(np.abs(mean - plain / sum(weights[client] for client in clients)).max())


def _endurance(clients: int, count: int, rounds: int) -> tuple[Any, ...]:
    """Rounds in each of which three in ten clients vanish, at any phase: every sum must be exact."""
    rng = np.random.default_rng(1)
    inputs = {client: rng.integers(0, 2**16, count, dtype="<u2") for client in range(clients)}
    lost, exact, seconds = round(0.3 * clients), 0, 0.0
    for number in range(rounds):
        gone = rng.choice(clients, lost, replace=False).tolist()
        began = time.perf_counter()
        drops = {client: int(rng.integers(len(PHASES))) for client in gone}
        survivors, total, traffic = secure_sum(inputs, clients - lost, drops, number)
        seconds += time.perf_counter() - began
        exact += bool((total == np.sum([inputs[client] for client in survivors], axis=0, dtype="<u2")).all())
    up = max(sum(sent.size for sent in traffic if sent[:2] == (client, "up")) for client in survivors)
    how = f"secagg, 16 bits: {exact} of {rounds} rounds exact"
    return _row(clients, count, lost, how, 16, Round(seconds / rounds, up, 0.0 if exact == rounds else np.inf))


# --- Flower ----------------------------------------------------------------------------------------------------------


def _flower_version() -> str:
    try:
        return f"Flower {importlib.metadata.version('flwr')}."
    except importlib.metadata.PackageNotFoundError:
        return "Flower is not installed (pip install flwr, or uv run --with flwr ...), so its rows are left out."


def _flower(
    values: Mapping[int, np.ndarray], weights: Mapping[int, int], threshold: int, drops: Mapping[int, int]
) -> Round:
    """A round of Flower's own client and server code, with messages passed as objects instead of over its network.

    Its phases are ours; who vanishes before one does not answer from then on. That must not be before shares are dealt: then
    the other clients of flwr 1.41 end in a KeyError when they are asked for shares of it.
    """
    os.environ |= QUIET  # read when Flower is imported
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.client.mod import secaggplus_mod
    from flwr.common import FitIns, FitRes, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
    from flwr.common.typing import Code, Status
    from flwr.compat.common import recorddict_compat as compat
    from flwr.server.compat.legacy_context import LegacyContext
    from flwr.server.strategy import FedAvg
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.supercore.task_identity import TaskIdentity

    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    nothing, ids = ndarrays_to_parameters([]), {client + 1: client for client in values}
    sent, means = dict.fromkeys(ids, 0), list[Any]()

    def context(node: int) -> Any:
        return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={}, series_id=1)

    contexts = {node: context(node) for node in ids}

    class Strategy(FedAvg):
        def configure_fit(self, *_: Any) -> Any:
            return [(SimpleNamespace(node_id=node), FitIns(nothing, {})) for node in ids]

        def aggregate_fit(self, _: int, results: Any, __: Any) -> Any:
            means.append(parameters_to_ndarrays(results[0][1].parameters)[0])
            return None, {}

    def train(message: Any, _: Any) -> Any:
        client = ids[message.metadata.dst_node_id]
        parameters = ndarrays_to_parameters([values[client]])
        reply = FitRes(Status(Code.OK, ""), parameters, weights[client], {})
        return Message(compat.fitres_to_recorddict(reply, keep_input=False), reply_to=message)

    class Grid:
        phase = -1

        def send_and_receive(self, messages: Any, timeout: Any = None) -> list[Any]:
            self.phase, replies = self.phase + 1, []
            for message in messages:
                node = message.metadata.dst_node_id
                if drops.get(ids[node], len(PHASES)) <= self.phase:
                    continue
                replies.append(secaggplus_mod(copy.deepcopy(message), contexts[node], train))
                sent[node] += replies[-1].content.config_records[RECORD_KEY_CONFIGS].count_bytes()
            return replies

    server = LegacyContext(context(0), strategy=Strategy())
    server.state.config_records["config"] = ConfigRecord({"current_round": 1})
    server.state.array_records["parameters"] = compat.parameters_to_arrayrecord(nothing, True)
    workflow = SecAggPlusWorkflow(len(ids), threshold, max_weight=WEIGHT, clipping_range=BOUND)
    began = time.perf_counter()
    workflow(cast(Any, Grid()), server)
    seconds = time.perf_counter() - began
    survivors = [client for client in values if drops.get(client, len(PHASES)) > PAD]
    return Round(seconds, max(sent.values()), _error(means[0], values, weights, survivors))
