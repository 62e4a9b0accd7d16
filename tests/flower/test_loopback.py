"""Real processes on this machine: a SuperLink with TLS, three registered SuperNodes, and what may go wrong with them.

They are started once, by the commands of docs/flower.md, and serve all tests of this file in turn.
"""

import re
from pathlib import Path

import pytest
from tests.flower.loopback import Processes, free_port

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedsieve[flower]'")
pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedsieve[flower]'")


pytestmark = pytest.mark.loopback
LIMIT = 400  # seconds for a run; a free machine takes a tenth
SITES = ("north", "south", "west")
DEMO = (
    "federation.clients=3",
    "federation.cohort=3",
    "federation.evaluate_every=1",
    "federation.partition={kind: iid}",
    "stages.backbone.rounds=2",
    "executor=sequential",
    "tracking=[]",
)


def steps() -> dict[str, str]:
    """The commands of the walk-through, by the words in front of them."""
    text = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    text = text[text.index("## Three sites, step by step") :]
    found = re.findall(r"\n\n([^\n]*(?:\n[^\n]+)*?):\n\n```bash\n(.*?)```", text, re.DOTALL)
    return dict(found)


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """The walk-through up to the SuperNodes, which stay until the last test of this file is over."""
    folder = tmp_path_factory.mktemp("walk")
    with Processes(folder) as processes:
        ports = {"9092": str(free_port())} | {f"909{number + 4}": str(free_port()) for number in range(3)}
        for commands in steps().values():
            commands = commands.replace("909$((number + 4))", "$((9094 + number))")
            if "flwr run" in commands:
                break
            for number, port in ports.items():
                commands = commands.replace(number, port)
            processes.bash(commands)
        processes.ports = ports
        yield processes
