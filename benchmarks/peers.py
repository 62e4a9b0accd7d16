"""Rounds of other frameworks, one at a time, so that they can take turns with ours: pfl-research and Flower's simulation.

Neither is a dependency. `pip install pfl "flwr[simulation]"`, or, for one run
`uv run --with pfl --with "flwr[simulation]<1.42" fedsieve bench NAME`.
"""

import contextlib
import importlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import python_path
from fedsieve.errors import FedsieveError
from fedsieve.flower import QUIET

ROUND_SECONDS = 600  # after which a round of Flower's is given up

Arrays = list[np.ndarray]
Client = Callable[[Arrays, int], tuple[Arrays, int]]  # weights and a client's number: its new weights and its n


PEERS = {
    "pfl": (["pfl.algorithm.federated_averaging", "pfl.model.pytorch"], "pfl"),
    "flower": (["ray", "flwr.simulation"], "flwr[simulation]"),
}


def missing(peer: str) -> str | None:
    """Why a peer cannot take part, and what to do about it; None where it can."""
    # Read when they are imported: Flower reports home, and Ray would start workers without this process's packages.
    os.environ |= {**QUIET, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    os.environ["PYTHONPATH"] = python_path()  # of Ray's workers
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # the future that it warns of
    modules, package = PEERS[peer]
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # of its own dependencies too
        why = (str(error) or type(error).__name__).splitlines()[0]
        return (
            f"{peer}: skipped, it cannot be imported ({why}). Install: pip install '{package}'; or for one run: "
            f"uv run --with '{package}' fedsieve bench ..."
        )
    return None


def pfl_rounds(
    model: nn.Module,
    loss: Callable[..., Tensor],
    users: Sequence[list[Any]],
    lr: float,
    batch: int,
    epochs: int,
) -> Callable[[], None]:
    """A function that does one round of pfl's federated averaging with all users, in this process.

    `loss(*batch)` is of `model`, `users` hold the tensors of each. Weights that require no gradient stay. bf16 on a GPU.
    """
    device = next(model.parameters()).device
    os.environ["PFL_PYTORCH_DEVICE"] = str(device)  # pfl would choose its own
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    module: Any = model
    module.loss = loss
    module.metrics = lambda *_: {"examples": Weighted(1, 1)}  # asked for before the first round
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapped = PyTorchModel(
        model,
        lambda parameters, lr: torch.optim.SGD(trained, lr=lr, momentum=0.9),
        torch.optim.SGD(trained, lr=1.0),
        amp_dtype=torch.bfloat16 if device.type == "cuda" else None,
    )
    data = FederatedDataset(
        lambda user: Dataset(raw_data=users[user], user_id=str(user)),
        get_user_sampler("minimize_reuse", list(range(len(users)))),
    )
    backend, algorithm = SimulatedBackend(training_data=data, val_data=data), FederatedAveraging()
    settings = NNTrainHyperParams(local_num_epochs=epochs, local_learning_rate=lr, local_batch_size=batch)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        length = NNAlgorithmParams(
            central_num_iterations=done, evaluation_frequency=2**40, train_cohort_size=len(users), val_cohort_size=0
        )
        algorithm.run(length, backend, wrapped, settings, send_metrics_to_platform=False)

    return step


@contextlib.contextmanager
def flower_rounds(client: Client, weights: Arrays, clients: int, gpus: float = 0.0) -> Iterator[Callable[[], None]]:
    """A function that does one round of Flower's federated averaging with all clients, in Ray's processes.

    `client` runs there. A client has one core, and with `gpus` that share of a GPU.
    """
    import ray
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    go: queue.Queue[bool] = queue.Queue()
    told: queue.Queue[str] = queue.Queue()
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        arrays, n = client(message.content.array_records["arrays"].to_numpy_ndarrays(), number)
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": n})})
        return Message(content=content, reply_to=message)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        """FedAvg's own loop, waiting before each round."""
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        arrays, number = ArrayRecord(weights), 0
        while go.get():
            number += 1
            sent = strategy.configure_train(number, arrays, ConfigRecord(), grid)
            replies = list(grid.send_and_receive(sent, timeout=ROUND_SECONDS))
            failed = [reply.error.reason for reply in replies if reply.has_error()]
            mean, _ = strategy.aggregate_train(number, replies)
            if failed or len(replies) < clients or mean is None:
                told.put(f"{clients - len(replies) + len(failed)} clients failed: {(failed or ['no answer'])[0]}")
                return
            arrays = mean
            told.put("")

    def simulate() -> None:
        resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus}
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            run_simulation(
                server_app, client_app, clients, backend_config={"client_resources": resources, "init_args": quiet}
            )
        except BaseException as error:  # it also exits
            told.put(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=simulate, daemon=True)
    thread.start()

    def step() -> None:
        go.put(True)
        try:
            problem = told.get(timeout=ROUND_SECONDS)
        except queue.Empty:
            problem = f"no round in {ROUND_SECONDS} s"
        if problem:
            raise FedsieveError(f"Flower's simulation: {problem.splitlines()[0][:300]}", 1)

    try:
        yield step
    finally:
        go.put(False)
        thread.join(timeout=60)
        ray.shutdown()
