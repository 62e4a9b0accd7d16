"""What a site accepts is exactly what it would have written itself, and what a person there has accepted."""

import hashlib
import io
import zipfile

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedsieve
from fedsieve.config import to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.flower.admission import LARGEST, MANIFEST, PROJECT, WAITING, Accepted, Refused, experiment_of
from fedsieve.flower.project import app_content
from fedsieve.flower.site import Policy
from fedsieve.runner.hosting import Host, answer
from fedsieve.runner.identity import experiment_digest
from fedsieve.wire.envelope import unwrap, wrap

CONFIG = {"out": "runs/here", "wait": 300.0, "deadline": 600.0}
SITES = "federation={clients: 2, cohort: 2}"


@pytest.fixture
def experiment(tiny):
    return tiny(SITES, "stages=[{name: all, rounds: 1}]")


@pytest.fixture
def text(experiment):
    return to_yaml(experiment)


@pytest.fixture
def content(text):
    return app_content(text, "experiment", dict(CONFIG))


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return buffer.getvalue()


def bundle(content: dict, **others: bytes) -> bytes:
    """A bundle as Flower makes it."""
    project = tomli_w.dumps(content).encode()
    manifest = f"{PROJECT},{hashlib.sha256(project).hexdigest()},{8 * len(project)}".encode()
    return zipped({PROJECT: project, MANIFEST: manifest, **others})


def opened(data: bytes, /, **overrides) -> str:
    return experiment_of(data, hashlib.sha256(data).hexdigest(), overrides)


def code(data: bytes, /, **overrides) -> str:
    with pytest.raises(Refused) as refusal:
        opened(data, **overrides)
    return refusal.value.code


def test_flowers_own_bundle_of_our_app_is_opened(tmp_path, text, content):
    build = pytest.importorskip("flwr.cli.build", reason="Flower is not installed: pip install 'fedsieve[flower]'")
    (tmp_path / "pyproject.toml").write_text(tomli_w.dumps(content, multiline_strings=True))
    assert opened(build.build_fab_from_disk(tmp_path)) == text


def test_a_bundle_with_any_other_file_is_refused(content):
    assert code(bundle(content, **{"evil.py": b"print()"})) == "bundle"
    assert code(zipped({PROJECT: tomli_w.dumps(content).encode()})) == "bundle"
    assert code(zipped({})) == "bundle"


def test_a_bundle_whose_digest_or_list_is_wrong_is_refused(content):
    with pytest.raises(Refused, match="digest"):
        experiment_of(bundle(content), "0" * 64, {})
    assert code(zipped({PROJECT: tomli_w.dumps(content).encode(), MANIFEST: b"pyproject.toml,0,0"})) == "bundle"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("project", "version"), "0.0.1"),
        (("project", "dependencies"), ["fedsieve[flower]", "evil"]),
        (("project", "scripts"), {"x": "os:abort"}),
        (("build-system",), {"requires": ["evil"], "build-backend": "evil"}),
        (("tool", "flwr", "app", "components", "clientapp"), "os:system"),
        (("tool", "flwr", "app", "components", "serverapp"), "evil:server"),
        (("tool", "flwr", "app", "components", "agentapp"), "evil:agent"),
        (("tool", "flwr", "app", "config", "data"), "/etc"),
        (("tool", "flwr", "app", "config", "wait"), "long"),
        (("tool", "uv"), {"index": "https://192.0.2.1"}),
    ],
)
def test_a_project_that_differs_anywhere_is_refused(content, place, value):
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert code(bundle(content)) == "bundle"


def test_overrides_of_our_four_settings_count_and_all_others_are_refused(text, content):
    data = bundle(content)
    assert opened(data, out="elsewhere", wait=1.0, deadline=2.0) == text
    assert opened(data, experiment="another") == "another"
    assert code(data, data="/etc") == "overrides"
    assert code(data, experiment=1) == "overrides"
    assert code(data, wait="long") == "overrides"


def test_no_more_is_unpacked_than_a_bundle_may_hold(content):
    assert code(zipped({PROJECT: bytes(LARGEST + 1), MANIFEST: b""})) == "bundle"


@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_bundle_is_refused_or_says_the_same(text, content, data):
    whole = bytearray(bundle(content))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        assert opened(cut) == text
    except Refused as refusal:
        assert refusal.code == "bundle"


def test_nothing_is_accepted_until_somebody_accepts_it_and_withdrawing_holds_at_once(tmp_path, experiment, text):
    accepted = Accepted(tmp_path, Policy())
    with pytest.raises(Refused, match="fedsieve node review") as refusal:
        accepted.check(text)
    assert refusal.value.code == "experiment"
    assert [file.read_text() for file in (tmp_path / "waiting").iterdir()] == [text]
    file = accepted.add(experiment)
    assert accepted.check(text) == file.stem and not list((tmp_path / "waiting").iterdir())
    with pytest.raises(Refused):
        accepted.check(text + "\n")
    file.unlink()
    with pytest.raises(Refused):
        accepted.check(text)


def test_a_server_cannot_fill_a_sites_disk_with_experiments(tmp_path):
    for number in range(3 * WAITING):
        with pytest.raises(Refused):
            Accepted(tmp_path, Policy()).check(f"name: x{number}")
    with pytest.raises(Refused):
        Accepted(tmp_path / "large", Policy()).check("x" * (LARGEST + 1))
    assert len(list((tmp_path / "waiting").iterdir())) == WAITING and not (tmp_path / "large" / "waiting").exists()


def test_an_experiment_is_accepted_under_the_installed_version_only(tmp_path, experiment, text, monkeypatch):
    accepted = Accepted(tmp_path, Policy())
    accepted.add(experiment)
    monkeypatch.setattr(fedsieve, "__version__", "9.9.9")
    with pytest.raises(Refused):
        accepted.check(text)


def test_a_question_about_another_experiment_than_the_bundles_is_refused(tmp_path, text):
    """A server whose bundle is accepted, and that then asks about something else: at once, or in a run it has met before."""
    run, host = "ab" * 8, Host(0, tmp_path, accepted=experiment_digest(text))
    lie = wrap(
        {"ask": "hello", "run": run, "version": fedsieve.__version__, "experiment": "name: other", "classes": []}
    )
    assert "another experiment" in unwrap(answer(lie, host))[0]["problem"]
    (tmp_path / run).mkdir(exist_ok=True)
    (tmp_path / run / "experiment.yaml").write_text(text + "# other")
    later = wrap({"ask": "train", "run": run, "client": 0, "stage": "all", "round": 0})
    assert "another experiment" in unwrap(answer(later, host))[0]["problem"]


def test_a_refusal_is_an_error_that_the_command_line_knows(text):
    assert isinstance(Refused("bundle", text), FedsieveError)


@pytest.mark.parametrize(
    ("policy", "changes", "objection"),
    [
        (Policy(require="secagg"), (), "policy.require here is secagg"),
        (Policy(require="secagg", cohort=3), ("privacy.aggregation=secagg", "message.up=fp32"), None),
        (Policy(cohort=4), (), "policy.cohort here is 4"),
        (Policy(cohort=2), ("federation.cohort=1",), "policy.cohort here is 2"),
        (Policy(cohort=3), (), None),
    ],
)
def test_an_experiment_against_the_policy_cannot_be_accepted_and_is_refused_if_it_was(
    tmp_path, tiny, policy, changes, objection
):
    made = tiny("federation={clients: 3, cohort: 3}", "stages=[{name: all, rounds: 1}]", *changes)
    Accepted(tmp_path, Policy()).add(made)  # before the policy was as it is
    strict = Accepted(tmp_path, policy)
    if objection is None:
        assert strict.add(made).stem == strict.check(to_yaml(made))
        return
    with pytest.raises(FedsieveError, match=objection):
        strict.add(made)
    with pytest.raises(Refused, match=objection) as refusal:
        strict.check(to_yaml(made))
    assert refusal.value.code == "policy"


@pytest.mark.parametrize(("policy", "sends"), [(Policy(bytes=250), 2), (Policy(rounds=3), 3), (Policy(), 5)])
def test_no_more_leaves_a_site_than_its_policy_allows_in_all_runs_together(tmp_path, policy, sends):
    sent = 0
    for _ in range(5):  # each with a memory of its own, as after a restart
        try:
            Accepted(tmp_path, policy).spend("ab", "train", 100)
        except Refused as refusal:
            assert refusal.code == "limit"
        else:
            sent += 1
    assert sent == sends
    Accepted(tmp_path, Policy(rounds=1)).spend("cd", "metrics", 100)


def test_weights_cache_and_device_never_come_from_the_server(tmp_path, tiny):
    made = tiny(
        SITES, "stages=[{name: all, rounds: 1}]", "device=cuda:3", "model.weights=/srv/secret.pth", "data.cache=/srv"
    )
    own = Host(0, tmp_path, weights="mine.pth", device="auto", accepted="0").own(made)
    assert (own.device, own.model.weights, own.data.cache) == ("auto", "mine.pth", None)
    with pytest.raises(FedsieveError, match="weights in site.yaml"):
        Host(0, tmp_path, device="auto", accepted="0").own(made)
