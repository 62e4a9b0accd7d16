"""Several processes that work on one experiment: rank 0 runs it, the others do what it asks of them.

Requests and short answers are pickled objects over gloo. Tensors of answers, and weights, go over the device's own backend:
gloo between CPUs, nccl between GPUs. Every rank has a thread that listens, so that a rank that is gone is noticed at
once, and one that gives signs of life, so that a rank that hangs is noticed after `SILENCE`.
"""

import contextlib
import heapq
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedsieve.errors import FedsieveError
from fedsieve.model.space import ParamSpace
from fedsieve.train.feed import Autocast, Examples
from fedsieve.train.objectives import PLAIN, Recipe
from fedsieve.train.replay import Speed

SILENCE = 300.0  # seconds without a sign of life after which a rank is lost
BEAT = 5.0  # seconds between signs of life
AHEAD = 2**30  # bytes of results that may wait for their turn

Batch = tuple[Tensor | None, ...]  # of some clients: each tensor (clients, ...)


class LostRank(FedsieveError):
    """A rank that was killed, failed, or is not heard of any more."""


@dataclass
class Desk:
    """The equipment of a rank: every rank has the same network and the same training images."""

    model: nn.Module
    train: Examples
    autocast: Autocast
    speed: Speed
    seed: int
    recipe: Recipe = PLAIN
    executor: Any = None  # what trains clients here

    def equip(self, executor: Any) -> None:
        """Train clients with this executor from here on."""
        self.executor = executor


class Request:
    """Work for a rank. Its tensors travel by way of the host; answers come in the order of its clients."""

    def perform(self, desk: Desk) -> Iterator[Batch]:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in vars(self).items()}


@dataclass(frozen=True)
class _Weights:
    changed: int | None  # how many weights follow, and their places before them; None: all follow


@dataclass(frozen=True)
class _Answer:
    tensors: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


@dataclass(frozen=True)
class _Failure:
    error: FedsieveError


_READY, _END, _ALIVE = "ready", "end", None


@dataclass
class Pace:
    """The extra work of rank 0 besides its share, in units of cost, learnt from one spreading for the next."""

    beside: float = 0.0


@dataclass(frozen=True)
class Split:
    """The rules by which clients are split among ranks."""

    group: int = 1  # clients that a rank works on at once
    together: int = 1  # answers that are given at a time
    most: int | None = None  # clients of one rank
    pace: Pace | None = None


SINGLE = Split()


def deal(costs: Sequence[float], ranks: int, beside: float = 0.0, most: int | None = None) -> list[list[int]]:
    """Deal the places of `costs` to ranks, each rank's ascending: the costliest first, to the rank with the least so far.

    The greedy rule of Graham (1969), at most a third worse than the best. Rank 0 begins with the cost `beside`; no rank takes
    more than `most`.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(beside if rank == 0 else 0.0, rank) for rank in range(ranks)]
    heapq.heapify(loads)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        load, rank = heapq.heappop(loads)
        shares[rank].append(place)
        if len(shares[rank]) != most:
            heapq.heappush(loads, (load + costs[place], rank))
    return [sorted(share) for share in shares]


class Team:
    """This process's place among the ranks: rank 0 tells, updates and spreads, the others serve."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        timeout = timedelta(seconds=SILENCE)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        talk = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(talk, dist.ProcessGroup)
        self.talk = talk
        self.others = [0] if self.rank else list(range(1, self.size))
        self.inbox: queue.SimpleQueue[tuple[int, Any, list[Tensor | None], list[dist.Work]]] = queue.SimpleQueue()
        self.lost: FedsieveError | None = None  # why the ranks cannot go on together
        self.ready: set[int] = set()
        self.known: Tensor | None = None  # the weights that all ranks have
        self.desk: Desk | None = None
        self.sent: list[tuple[Tensor, dist.Work]] = []  # the last answer, until it has arrived
        self._lock, self._over = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._listen, args=(other,), daemon=True) for other in self.others]
        self._threads.append(threading.Thread(target=self._live, daemon=True))
        for thread in self._threads:
            thread.start()

    # --- both sides --------------------------------------------------------------------------------------------------

    def _send(self, to: int, message: Any) -> None:
        with self._lock:
            dist.send_object_list([message], to, group=self.talk)

    def _listen(self, other: int) -> None:
        """Take in all that another rank sends, until it is gone."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            while True:
                received: list[Any] = [None]
                dist.recv_object_list(received, other, group=self.talk)
                message, tensors = received[0], list[Tensor | None]()
                if message == _END:
                    self._leave(self.lost.exit_code if self.lost else 0)
                if isinstance(message, _Failure):
                    return self._lose(message.error)
                if isinstance(message, _Answer):
                    tensors = [
                        None if of is None else torch.empty(of[0], dtype=of[1], device=self.device)
                        for of in message.tensors
                    ]
                works = [dist.irecv(tensor, other) for tensor in tensors if tensor is not None]
                if message is not _ALIVE:
                    self.inbox.put((other, message, tensors, [work for work in works if work is not None]))
        except Exception as error:
            what = f"is gone: {_first_line(error)}"
            if "imed out" in str(error):
                what = f"has not been heard of for {SILENCE:.0f} s"
            elif "Connection" in str(error):
                what = "is gone: its process ended or was killed"
            self._lose(LostRank(f"rank {other} {what}", 1))

    def _lose(self, error: FedsieveError) -> None:
        if self.rank:
            self._leave(1)  # nobody is left to work for
        self.lost = self.lost or error
        self.inbox.put((0, None, [], []))  # whoever waits looks up

    def _live(self) -> None:
        """Give signs of life until it is over."""
        with contextlib.suppress(RuntimeError):
            while not self._over.wait(BEAT):
                for other in self.others:
                    self._send(other, _ALIVE)

    def _leave(self, code: int) -> NoReturn:
        """End this process now, whatever its other threads do: it holds nothing that must be saved."""
        os._exit(code)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Say which rank was lost where torch says that a connection broke."""
        if self.lost:
            raise self.lost
        try:
            yield
        except RuntimeError as error:
            if self.rank:
                self._leave(1)
            for _ in range(50):  # the thread that listens knows in a moment
                if self.lost:
                    raise self.lost from None
                time.sleep(0.1)
            raise LostRank(f"the connection between ranks broke: {_first_line(error)}", 1) from None

    # --- rank 0 ------------------------------------------------------------------------------------------------------

    def tell(self, message: Any) -> None:
        """Send the same to every other rank."""
        with self._connected():
            for other in self.others:
                self._send(other, message)

    def update(self) -> None:
        """Give all ranks the weights that the model has here."""
        assert self.desk is not None
        while len(self.ready) < len(self.others):
            self._next(wait=True)
        now = ParamSpace.of(self.desk.model).read(self.desk.model)
        places = None if self.known is None else (now != self.known).nonzero().squeeze(1)
        if places is not None and not len(places):
            return
        if places is not None and len(places) > len(now) // 2:
            places = None
        self.tell(_Weights(None if places is None else len(places)))
        with self._connected():
            for tensor in [now] if places is None else [places, now[places]]:
                dist.broadcast(tensor, 0)
        self.known = now

    def spread(
        self,
        costs: Sequence[float],
        request: Callable[[list[int]], Request],
        bytes_each: int,
        split: Split = SINGLE,
    ) -> Iterator[tuple[range, Batch]]:
        """Have clients worked on by all ranks, this one among them, and give the answers in order as soon as they are there.

        `request` makes what is asked for some clients, by their places in `costs`. Answers that may wait for their turn are
        bounded: nobody begins a client that is too far ahead.
        """
        assert self.desk is not None
        group, together, most, pace = split.group, split.together, split.most, split.pace
        shares = deal(costs, self.size, pace.beside if pace else 0.0, most)
        # Other ranks are asked for some clients at a time; this one looks up after each to serve them.
        sizes = [group] + [group * -(-8 // group)] * len(self.others)
        left = [
            deque(share[first : first + size] for first in range(0, len(share), size))
            for share, size in zip(shares, sizes, strict=True)
        ]
        asked: list[deque[int]] = [deque() for _ in shares]
        window = max(2 * sum(sizes), together, AHEAD // max(1, bytes_each))
        answers: dict[int, Batch] = {}
        turn, done, working, waiting, began = 0, 0.0, 0.0, 0.0, time.perf_counter()
        while turn < len(costs):
            due = range(turn, min(turn + together, len(costs)))
            for other in self.others:
                while left[other] and left[other][0][0] < turn + window:
                    places = left[other].popleft()
                    with self._connected():
                        self._send(other, request(places))
                    asked[other].extend(places)
            mine = bool(left[0]) and left[0][0][0] < turn + window
            clock = time.perf_counter()
            while found := self._next(wait=not (mine or all(place in answers for place in due))):
                _sort(asked[found[0]], found[1], answers)
            waiting += time.perf_counter() - clock
            if all(place in answers for place in due):
                rows = [answers.pop(place) for place in due]
                yield due, rows[0] if len(rows) == 1 else _joined(rows)
                turn = due.stop
            elif mine:
                clock = time.perf_counter()
                places = left[0].popleft()
                asked[0].extend(places)
                for batch in request(places).perform(self.desk):
                    _sort(asked[0], batch, answers)
                working += time.perf_counter() - clock
                done += sum(costs[place] for place in places)
        if pace and working:
            pace.beside = (time.perf_counter() - began - working - waiting) * done / working

    def _next(self, wait: bool) -> tuple[int, Batch] | None:
        """The next answer and its rank. None: there is none now, or (after waiting) something else has changed."""
        try:
            # In short waits, since no signal is delivered within one.
            rank, message, tensors, works = self.inbox.get(timeout=1.0) if wait else self.inbox.get_nowait()
        except queue.Empty:
            return None
        if self.lost:
            raise self.lost
        if message == _READY:
            self.ready.add(rank)
        if not isinstance(message, _Answer):
            return None
        with self._connected():
            for work in works:
                work.wait()
        return rank, tuple(tensors)

    def end(self) -> None:
        """Send the other ranks home."""
        self._over.set()
        for other in self.others:
            with contextlib.suppress(RuntimeError):
                self._send(other, _END)
        for thread in self._threads:
            thread.join(5.0)
        if not any(thread.is_alive() for thread in self._threads):
            dist.destroy_process_group()

    # --- the other ranks ---------------------------------------------------------------------------------------------

    def serve(self, meanwhile: Callable[[], object], prepare: Callable[[Any], Desk]) -> NoReturn:
        """Do what rank 0 asks until it ends. `prepare` makes the desk of what it says first, `meanwhile` comes before."""
        try:
            try:
                meanwhile()
                self.desk = prepare(self.inbox.get()[1])
            except FedsieveError as error:
                raise LostRank(f"rank {self.rank} cannot take part: {error}", 1) from None
            with self._connected():
                self._send(0, _READY)
            while True:
                message = self.inbox.get()[1]
                if isinstance(message, _Weights):
                    self._take_weights(message)
                else:
                    self._answer(message.perform(self.desk))
        except FedsieveError as error:
            self._fail(error)
        except BaseException as error:
            traceback.print_exc()
            self._fail(LostRank(f"rank {self.rank} failed: {type(error).__name__}: {_first_line(error)}", 1))

    def _answer(self, batches: Iterator[Batch]) -> None:
        for batch in batches:
            with self._connected():
                for _, work in self.sent:
                    work.wait()
                self._send(0, _Answer(tuple(None if t is None else (tuple(t.shape), t.dtype) for t in batch)))
                tensors = [tensor.contiguous() for tensor in batch if tensor is not None]
                works = [dist.isend(tensor, 0) for tensor in tensors]
                self.sent = [(tensor, work) for tensor, work in zip(tensors, works, strict=True) if work is not None]

    def _fail(self, error: FedsieveError) -> NoReturn:
        self.lost = error  # rank 0 may answer with the end before this process is gone
        with contextlib.suppress(RuntimeError):
            self._send(0, _Failure(error))
        self._leave(error.exit_code)

    def _take_weights(self, message: _Weights) -> None:
        assert self.desk is not None
        whole = ParamSpace.of(self.desk.model)
        with self._connected():
            if message.changed is None:
                self.known = whole.read(self.desk.model)
                dist.broadcast(self.known, 0)
            else:
                assert self.known is not None
                places = torch.empty(message.changed, dtype=torch.int64, device=self.device)
                values = self.known.new_empty(message.changed)
                for tensor in (places, values):
                    dist.broadcast(tensor, 0)
                self.known[places] = values
        whole.write(self.desk.model, self.known)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _sort(places: deque[int], batch: Batch, answers: dict[int, Batch]) -> None:
    """Note the answers for the first of the places that were asked for."""
    count = len(next(tensor for tensor in batch if tensor is not None))
    for row in range(count):
        answers[places.popleft()] = tuple(None if tensor is None else tensor[row : row + 1] for tensor in batch)


def _joined(rows: Sequence[Batch]) -> Batch:
    return tuple(
        None if column[0] is None else torch.cat([tensor for tensor in column if tensor is not None])
        for column in zip(*rows, strict=True)
    )
