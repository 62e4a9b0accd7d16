"""Plugins: words from a file that the person at the keyboard names, and from nowhere else."""

import subprocess
import sys

import pytest

RULES = '''
import fedsieve as fs

@fs.register("aggregator", "first")
def first(updates, weights, *, times: float = 1.0):
    """the first update, some times over"""
    return times * updates[0]

@fs.register("rule", "far", evidence=("weights",))
def far(evidence):
    """trains the weights far from zero"""
    return evidence.weights.abs()
'''
CONFIG = """
name: own
device: cpu
threads: 1
tracking: []
data: {source: digits, size: 8, normalize: half, val_fraction: 0.2}
model: {backbone: vit_tiny_patch16_224, options: {patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}, weights: none}
federation: {clients: 8, cohort: 3, aggregator: {kind: first, times: 0.5}}
mask: {rule: far, sparsity: 0.5}
stages: [{name: all, train: all, sparse: true, rounds: 2, local: {steps: 2}, batch_size: 16, optimizer: {lr: 0.1}}]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_rules.py").write_text(RULES)
    (tmp_path / "own.yaml").write_text(CONFIG)
    return tmp_path


def fedsieve(folder, *words):
    command = [sys.executable, "-m", "fedsieve", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


PLUGIN = ("--plugin", "my_rules.py")


def test_a_plugin_adds_words_that_run_list_and_resume_know(folder):
    listed = fedsieve(folder, "list", "aggregators", *PLUGIN)
    assert "first" in listed.stdout and "the first update, some times over (times)" in listed.stdout
    done = fedsieve(folder, "run", "own.yaml", *PLUGIN, "--out", "run", "-q")
    assert done.returncode == 0, done.stderr
    assert "my_rules.py" in (folder / "run" / "environment.json").read_text()
    lost = fedsieve(folder, "resume", "run")
    assert lost.returncode == 2 and "add --plugin my_rules.py" in lost.stderr
    assert fedsieve(folder, "resume", "run", *PLUGIN).returncode == 0


def test_a_run_is_not_continued_with_a_changed_plugin(folder):
    assert fedsieve(folder, "run", "own.yaml", *PLUGIN, "--out", "run", "-q").returncode == 0
    (folder / "run" / "summary.json").unlink()
    (folder / "my_rules.py").write_text(RULES + "# changed\n")
    refused = fedsieve(folder, "resume", "run", *PLUGIN)
    assert refused.returncode == 2 and "is not what this run began with" in refused.stderr


def test_neither_a_config_nor_a_run_folder_imports_code(folder):
    (folder / "my_rules.py").write_text("raise SystemExit('imported')\n")
    refused = fedsieve(folder, "run", "own.yaml", "--dry-run")
    assert refused.returncode == 2 and "imported" not in refused.stderr
    assert "federation.aggregator.kind: 'first' is not allowed" in refused.stderr


def test_a_broken_plugin_is_named_with_its_traceback(folder):
    (folder / "broken.py").write_text("import fedsieve\n1 / 0\n")
    failed = fedsieve(folder, "list", "--plugin", "broken.py")
    assert failed.returncode == 2
    assert "--plugin: broken.py failed: ZeroDivisionError" in failed.stderr and "line 2" in failed.stderr
    missing = fedsieve(folder, "list", "--plugin=gone.py")
    assert missing.returncode == 2 and "gone.py: no such file" in missing.stderr


def test_a_typo_of_a_plugins_word_is_answered_without_torch(folder):
    code = (
        "import sys; from fedsieve.cli.root import main\n"
        "try: main(['run', 'own.yaml', '--plugin', 'my_rules.py', 'federation.aggregator.kind=frist'])\n"
        "except SystemExit as error: print(error.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.stdout == "2 False\n" and 'Did you mean "first"' in done.stderr, done.stderr
