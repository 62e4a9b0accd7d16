"""One experiment on several processes, as torchrun starts them: rank 0 runs it as ever, the others help it train.

torchrun --nproc-per-node 2 -m fedsieve run CONFIG.yaml executor=distributed
"""

import contextlib
import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from fedsieve import launch
from fedsieve.config import Experiment
from fedsieve.errors import FedsieveError
from fedsieve.federation.team import Desk, LostRank, Team
from fedsieve.model.weights import digest
from fedsieve.runner.environment import choose_device
from fedsieve.runner.preflight import preflight
from fedsieve.runner.prepare import prepare
from fedsieve.runner.progress import Display
from fedsieve.runner.setup import Setup, chosen_executor


def check_launch(experiment: Experiment, resumed: bool = False) -> None:
    """Refuse an executor that does not fit the way this process was started. A resumed run may continue in one process."""
    if experiment.executor == "distributed" and not launch.launched() and not resumed:
        raise FedsieveError(
            "executor: distributed runs on the processes that torchrun starts: `torchrun --nproc-per-node 2 -m fedsieve "
            "run CONFIG.yaml executor=distributed`. In one process: executor=auto"
        )
    if experiment.executor != "distributed" and launch.ranks() > 1:
        way = "Resume it" if resumed else "Say executor=distributed, or start fedsieve"
        raise FedsieveError(
            f"executor: {experiment.executor} runs in one process, but torchrun started {launch.ranks()}. {way} without torchrun"
        )


def check_ranks(experiment: Experiment, device: torch.device, began: int | None) -> None:
    """Refuse to go on with other ranks than a run `began` with where that would change more than its speed."""
    stacked = chosen_executor(experiment, device) == "stacked"
    if experiment.privacy.dp and stacked and began not in (None, launch.ranks()):
        raise FedsieveError(
            f"privacy.dp: a run that is resumed must repeat its rounds bit for bit, since it repeats their noise. Clients that "
            f"are stacked do so only on as many ranks as before, {began}; torchrun started {launch.ranks()}"
        )


@contextlib.contextmanager
def leading(experiment: Experiment) -> Iterator[Team | None]:
    """The ranks that help this one until the block ends; None where it is alone."""
    if launch.ranks() == 1:
        yield None
        return
    team = Team(_own_device(experiment))
    try:
        yield team
    except FedsieveError as error:
        if team.lost:  # torchrun asks all to stop, and this rank has yet to say why
            _ignore_stops()
        if isinstance(team.lost, LostRank) and str(team.lost) not in str(error):
            raise FedsieveError(f"{team.lost}. {error}", 1) from None
        raise
    finally:
        team.end()


def help_out(experiment: Experiment) -> NoReturn:
    """Work for rank 0 until its run ends, and with it this process. Writes nothing and prints nothing."""
    warnings.simplefilter("ignore")
    team = Team(_own_device(experiment))
    _ignore_stops()  # rank 0 decides when to stop, and needs help with the round it is in
    team.serve(lambda: preflight(experiment), _lay_out)


def _ignore_stops() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class Prepare:
    """The first message of rank 0: the setup that every rank needs."""

    experiment: Experiment
    threads: int
    marks: Mapping[str, str]  # of weights and data, as rank 0 has them
    labels: Tensor  # of the training images, as clients have them


def share(team: Team, setup: Setup, marks: Mapping[str, str]) -> None:
    """Have all ranks prepare what this one has prepared: caches are filled by now."""
    team.desk = _desk(setup)
    team.tell(Prepare(setup.experiment, torch.get_num_threads(), marks, setup.train.labels.cpu()))


def _lay_out(message: Prepare) -> Desk:
    torch.set_num_threads(message.threads)  # sums are split by thread
    setup = prepare(message.experiment, Display.silent())
    mine = {"model.weights": digest(setup.model), "data.source": setup.data_fingerprint}
    for key, mark in mine.items():
        if message.marks[key] != mark:
            raise FedsieveError(f"{key}: its content is not that of rank 0. All ranks need the same", 1)
    train = setup.train.over(setup.train.rows, message.labels.to(setup.device))
    return _desk(replace(setup, train=train))


def _desk(setup: Setup) -> Desk:
    return Desk(setup.model, setup.train, setup.autocast, setup.speed, setup.experiment.seed)


def _own_device(experiment: Experiment) -> torch.device:
    """The CPU, or this rank's own GPU, which "cuda" means from here on."""
    device = choose_device(experiment.device)
    if device.type == "cpu":
        return device
    here, count = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if device.index is not None:
        raise FedsieveError(f"device: {device} is one GPU, but every rank takes one of its own: say device=cuda")
    if here > count:
        raise FedsieveError(
            f"device: {here} ranks need a GPU each, and this machine has {count}. Start torchrun with --nproc-per-node "
            f"{count}, or say device=cpu"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
