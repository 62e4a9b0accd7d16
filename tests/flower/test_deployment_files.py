"""The files under deploy/ are those of the commands, and what the commands make is as private as it should be."""

import re
import stat
from pathlib import Path

import pytest
import yaml

from fedsieve.cli import main
from fedsieve.errors import FedsieveError
from fedsieve.federation.sent import note
from fedsieve.flower import QUIET
from fedsieve.flower.deployment import init_server, proxy_configuration, split_address
from fedsieve.flower.keys import read_site_key
from fedsieve.flower.site import SETTINGS_FILE, WRITTEN, SiteSettings, init_site, read_site

DEPLOY = Path(__file__).parents[2] / "deploy"


def modes(folder: Path) -> dict[str, int]:
    return {str(file.relative_to(folder)): stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*")}


@pytest.fixture
def server(tmp_path):
    init_server(tmp_path / "server", "server.example.org:9092", None)
    return tmp_path / "server"


@pytest.fixture
def site(tmp_path, server):
    init_site(tmp_path / "site", SiteSettings(server="server.example.org:9092", client=0), server / "ca.crt")
    return tmp_path / "site"


def test_the_proxys_configuration_in_the_repository_is_the_one_that_init_writes(server):
    assert (DEPLOY / "nginx.conf").read_text() == proxy_configuration("0.0.0.0", 9092, 9093)
    assert (server / "proxy" / "nginx.conf").read_text() == (DEPLOY / "nginx.conf").read_text()


def test_private_keys_are_readable_by_their_owner_alone_and_a_site_shares_none(server, site):
    found = modes(server) | modes(site)
    private = {name for name in found if name.endswith("key")}
    assert private == {"ca.key", "proxy/server.key", "superlink/server.key", "key"}
    assert all(found[name] == 0o600 for name in private)
    secrets = {(server / name).read_bytes() for name in private if name != "key"} | {(site / "key").read_bytes()}
    assert len(secrets) == 4  # each is a key of its own
    assert not any(b"PRIVATE" in (site / name).read_bytes() for name in ("key.pub", "ca.crt", SETTINGS_FILE))


def test_a_key_that_others_can_read_is_refused(site):
    assert read_site_key(site / "key").curve.name == "secp384r1"
    (site / "key").chmod(0o640)
    with pytest.raises(FedsieveError, match="chmod 600"):
        read_site_key(site / "key")


def test_a_folder_with_files_is_never_overwritten(server, site):
    with pytest.raises(FedsieveError, match="there already"):
        init_server(server, "server.example.org:9092", None)
    with pytest.raises(FedsieveError, match="there already"):
        init_site(site, read_site(site), server / "ca.crt")


@pytest.mark.parametrize(
    "address", ["", "server", ":9092", "server:0", "server:70000", "server:x", "a b:1", "a;b:1", "-x:1"]
)
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(FedsieveError, match="--address"):
        split_address("--address", address)


def test_a_wrong_key_in_site_yaml_is_named(site, capsys):
    (site / SETTINGS_FILE).write_text("server: a:1\nclient: 0\npolicy: none\n")
    with pytest.raises(SystemExit) as end:
        main(["node", "run", str(site)])
    assert end.value.code == 2 and re.search(r"site.yaml: policy: .*Its keys: server, client", capsys.readouterr().err)


def test_no_service_calls_home_or_writes_more_than_it_must():
    quiet = [f"{name}={value}" for name, value in QUIET.items()]
    for name in ("systemd/fedsieve-superlink.service", "systemd/fedsieve-node.service", "Dockerfile"):
        assert all(word in (DEPLOY / name).read_text() for word in quiet), name
    node = (DEPLOY / "systemd" / "fedsieve-node.service").read_text()
    assert re.search("^ReadWritePaths=(.*)$", node, re.M)[1].split() == [
        f"/var/lib/fedsieve/site/{one}" for one in WRITTEN
    ]
    for file in DEPLOY.glob("*.compose.yaml"):
        for service in yaml.safe_load(file.read_text())["services"].values():
            assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"] == "10001:10001"
    assert yaml.safe_load((DEPLOY / "node.compose.yaml").read_text())["services"]["node"]["volumes"][-1].endswith(":ro")


def test_a_site_verifies_what_left_it(site, capsys):
    def verify() -> int:
        with pytest.raises(SystemExit) as end:
            main(["node", "verify", str(site)])
        return end.value.code

    assert verify() == 0 and "nothing has left" in capsys.readouterr().out
    note(site / "files" / "abcd", {"run": "abcd", "ask": "train", "round": 0}, [{"what": "update", "bytes": 5}], 9)
    assert verify() == 0 and "2 lines, whole" in capsys.readouterr().out
    log = site / "files" / "abcd" / "sent.jsonl"
    log.write_text(log.read_text().replace('"bytes": 5', '"bytes": 4'))
    assert verify() == 1 and "sent.jsonl, line 1" in capsys.readouterr().err
