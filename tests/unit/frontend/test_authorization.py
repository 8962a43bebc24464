"""Keys: which one opens what, until when, and after a restart. HostCheck: which names and pages are foreign."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flambeau.config.server import KeysConfig
from flambeau.errors import ConfigError, ForeignRequest, InvalidKey
from flambeau.frontend.authorization import LOOK_S, HostCheck, Keys, bearer
from flambeau.frontend.key_file import locked, write_private
from support.log_records import logged

LOGGER, FILE_LOGGER = "flambeau.frontend.authorization", "flambeau.frontend.key_file"
NOW = 1_700_000_000.0


@pytest.fixture
def clock():
    return [NOW]


@pytest.fixture
def config(tmp_path):
    return KeysConfig(file=tmp_path / "key_file.json", expiry_s=60)


@pytest.fixture
def new(config, clock):
    def new_keys(environment=(), **changes):
        return Keys(
            KeysConfig(file=config.file, expiry_s=changes.get("expiry_s", 60)), dict(environment), lambda: clock[0]
        )

    return new_keys


def secrets_in(keys):
    return {kind: entry["key"] for kind, entry in json.loads(keys.file.read_text()).items()}


def test_file_is_private_and_holds_three_long_keys_of_which_two_expire(new):
    keys = new()
    document = json.loads(keys.file.read_text())
    assert keys.file.stat().st_mode & 0o777 == 0o600
    assert [*document] == ["management", "inference", "API"]
    assert all(len(entry["key"]) >= 32 for entry in document.values())
    assert document["inference"]["expiration time"] == "2023-11-14T22:14:20Z"
    assert "expiration time" not in document["API"]
    assert [*keys.file.parent.iterdir()] == [keys.file]


def test_each_key_opens_its_own_api_until_it_expires(new, clock):
    keys = new()
    found = secrets_in(keys)
    keys.check("inference", f"Bearer {found['inference']}")
    keys.check("management", f"Bearer   {found['management']}")
    for kind, wrong in [("inference", "management"), ("management", "inference"), ("inference", "API")]:
        with pytest.raises(InvalidKey, match=r"^Token Authorization failed. Token either incorrect, expired, or not"):
            keys.check(kind, f"Bearer {found[wrong]}")
    clock[0] += 60
    with pytest.raises(InvalidKey):
        keys.check("inference", f"Bearer {found['inference']}")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "bearer k", "Basic k", "k", "Bearer a b", "XBearer k"]
)
def test_only_a_bearer_header_carries_a_key(header):
    assert bearer(header) == ""


def test_text_beyond_ascii_is_refused_like_any_other(new):
    with pytest.raises(InvalidKey):
        new().check("inference", "Bearer schlüssel")


def test_api_key_renews_the_others_and_the_old_one_ends_at_once(new):
    keys = new()
    before = secrets_in(keys)
    keys.renew("inference", f"Bearer {before['API']}")
    after = secrets_in(keys)
    assert after["inference"] != before["inference"]
    assert {**after, "inference": ""} == {**before, "inference": ""}
    keys.check("inference", f"Bearer {after['inference']}")
    with pytest.raises(InvalidKey):
        keys.check("inference", f"Bearer {before['inference']}")
    assert keys.file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", [None, "", "API", "other"])
def test_nothing_else_can_be_renewed(new, kind):
    keys = new()
    with pytest.raises(InvalidKey, match=r"^Token Authentication failed. Token either incorrect, expired, or not"):
        keys.renew(kind, f"Bearer {secrets_in(keys)['API']}")


def test_only_the_api_key_renews(new):
    keys = new()
    with pytest.raises(InvalidKey, match=r"^Token Authentication failed"):
        keys.renew("inference", f"Bearer {secrets_in(keys)['management']}")


def test_keys_survive_a_restart_until_they_expire(new, clock):
    before = secrets_in(new())
    clock[0] += 30
    assert secrets_in(new()) == before
    clock[0] += 40
    after = secrets_in(new())
    assert after["API"] == before["API"]
    assert after["inference"] != before["inference"]


def test_shorter_expiry_counts_for_keys_of_an_earlier_run(new, clock):
    keys = new()
    again = new(expiry_s=10)
    clock[0] += 11
    with pytest.raises(InvalidKey):
        again.check("inference", f"Bearer {secrets_in(keys)['inference']}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "{}",
        '{"inference": {"key": "8letters", "expiration time": "2099-01-01T00:00:00Z"}}',
    ],
)
def test_short_keys_in_the_file_are_replaced(new, config, text):
    config.file.write_text(text)
    assert all(len(secret) >= 32 for secret in secrets_in(new()).values())


@pytest.mark.parametrize("text", ["[]", "{no", '{"inference": 7}', '{"name": "package"}', "notes", "[" * 100_000])
def test_file_that_holds_no_keys_is_not_overwritten(new, config, text):
    config.file.write_text(text)
    with pytest.raises(ConfigError, match=r"key_file\.json holds something other than keys.*name another key file"):
        new()
    assert config.file.read_text() == text


def test_link_folder_and_device_are_not_overwritten(new, config, tmp_path):
    new()
    elsewhere = config.file.rename(tmp_path / "elsewhere.json")
    before = elsewhere.read_text()
    for make, words in [
        (lambda: config.file.symlink_to(tmp_path / "missing"), "is a link"),
        (lambda: os.mkfifo(config.file), "is not a regular file"),
    ]:
        make()
        kind = config.file.lstat().st_mode
        with pytest.raises(ConfigError, match=words):
            new()
        assert config.file.lstat().st_mode == kind
        config.file.unlink()
    config.file.mkdir()
    with pytest.raises(ConfigError, match="is not a regular file"):
        new()
    assert elsewhere.read_text() == before


@pytest.fixture
def secret(new, config, tmp_path):
    """The three keys, mounted as a cluster mounts a secret: a link to ..data, which is a link to a dated folder."""
    folder = tmp_path / "..2026"
    folder.mkdir()
    new(expiry_s=None)
    config.file.rename(folder / config.file.name)
    (tmp_path / "..data").symlink_to(folder.name)
    config.file.symlink_to(f"..data/{config.file.name}")
    (folder / config.file.name).chmod(0o444)
    return folder / config.file.name


def test_keys_of_a_mounted_secret_are_read_and_never_written(new, config, secret, clock):
    before = secret.read_text()
    keys = new(expiry_s=None)
    key = json.loads(before)["inference"]["key"]
    keys.check("inference", f"Bearer {key}")
    with pytest.raises(ConfigError, match="is a link: keys are read through it, but not written"):
        keys.renew("inference", f"Bearer {json.loads(before)['API']['key']}")
    assert (secret.read_text(), config.file.is_symlink()) == (before, True)

    # The cluster replaces a secret by pointing ..data elsewhere.
    newer = secret.parent.with_name("..2027")
    newer.mkdir()
    changed = json.loads(before) | {"inference": {"key": "n" * 32}}
    (newer / config.file.name).write_text(json.dumps(changed))
    data = secret.parent.with_name("..data")
    data.unlink()
    data.symlink_to(newer.name)
    clock[0] += LOOK_S
    keys.check("inference", "Bearer " + "n" * 32)
    with pytest.raises(InvalidKey):
        keys.check("inference", f"Bearer {key}")


def test_link_to_keys_that_others_may_change_is_refused(new, secret, caplog):
    secret.chmod(0o646)
    with pytest.raises(ConfigError, match="has no valid management and no inference key"):
        new()
    assert "others may change it (its mode is 0646)" in caplog.text


def test_link_to_a_device_or_to_too_few_keys_is_refused(new, config, secret):
    secret.chmod(0o600)
    secret.write_text(json.dumps({"inference": {"key": "i" * 32}}))
    with pytest.raises(ConfigError, match="has no valid management key; put them into the file behind it"):
        new()
    config.file.unlink()
    config.file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="no valid management"):
        new()


def test_processes_that_change_the_file_at_once_lose_no_key(new, config):
    new()

    def add(name):
        with locked(config.file):
            document = json.loads(config.file.read_text())
            write_private(config.file, {**document, name: {"key": name * 32, "api": "inference"}})

    names = "abcdefghijkl"
    with ThreadPoolExecutor(len(names)) as threads:  # locks are of open files, so threads exclude each other as well
        [*threads.map(add, names)]
    assert {*secrets_in(new())} == {"management", "inference", "API", *names}


def test_renewal_keeps_what_another_process_has_added_a_moment_before(new, config):
    keys = new()
    document = json.loads(config.file.read_text())
    write_private(config.file, {**document, "alice": {"key": "a" * 40, "api": "inference"}})
    keys.renew("inference", f"Bearer {document['API']['key']}")
    assert secrets_in(keys)["alice"] == "a" * 40


def test_file_that_stays_locked_is_an_error(config):
    with (
        locked(config.file),
        pytest.raises(ConfigError, match="stays locked by another process"),
        locked(config.file, 0),
    ):
        pass


def test_own_keys_are_used_and_do_not_expire(new, clock):
    own = "o" * 32
    keys = new({"FLAMBEAU_INFERENCE_KEY": own})
    clock[0] += 1e6
    keys.check("inference", f"Bearer {own}")


def test_own_keys_that_are_too_short_or_the_same_are_an_error(new):
    with pytest.raises(ConfigError, match="FLAMBEAU_API_KEY must be at least 32"):
        new({"FLAMBEAU_API_KEY": "short"})
    with pytest.raises(ConfigError, match="must differ"):
        new({"FLAMBEAU_API_KEY": "a" * 32, "FLAMBEAU_INFERENCE_KEY": "a" * 32})


def test_folder_that_cannot_be_written_has_a_private_stand_in(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    keys = Keys(KeysConfig(file=tmp_path / "nowhere" / "key_file.json"), {})
    assert keys.file is not None
    assert keys.file.parent.stat().st_mode & 0o777 == 0o700
    [(wanted, _, used)] = logged(caplog, LOGGER)
    assert (wanted, used) == (tmp_path / "nowhere" / "key_file.json", keys.file)


def test_without_any_place_to_write_keys_must_be_supplied(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    config = KeysConfig(file=Path("/proc/nowhere/key_file.json"))
    with pytest.raises(ConfigError, match="supply the keys as FLAMBEAU_MANAGEMENT_KEY"):
        Keys(config, {})
    names = ("MANAGEMENT", "INFERENCE", "API")
    keys = Keys(config, {f"FLAMBEAU_{name}_KEY": letter * 32 for name, letter in zip(names, "mia", strict=True)})
    assert keys.file is None
    keys.check("management", "Bearer " + "m" * 32)


def test_keys_live_until_they_are_revoked_unless_an_expiry_is_set(config, clock):
    keys = Keys(KeysConfig(file=config.file), {}, lambda: clock[0])
    found = secrets_in(keys)
    clock[0] += 1e9
    keys.check("inference", f"Bearer {found['inference']}")
    assert secrets_in(Keys(KeysConfig(file=config.file), {}, lambda: clock[0])) == found


def test_changed_file_counts_within_a_second(new, clock, config):
    keys = new()
    document = json.loads(config.file.read_text())
    named = {**document, "alice": {"key": "a" * 40, "api": "inference"}}
    write_private(config.file, named)
    clock[0] += LOOK_S
    keys.check("inference", "Bearer " + "a" * 40)
    keys.check("inference", f"Bearer {document['inference']['key']}")
    with pytest.raises(InvalidKey):
        keys.check("management", "Bearer " + "a" * 40)
    del named["alice"], named["inference"]
    write_private(config.file, named)
    clock[0] += LOOK_S
    for revoked in ("a" * 40, document["inference"]["key"]):
        with pytest.raises(InvalidKey):
            keys.check("inference", f"Bearer {revoked}")
    keys.check("management", f"Bearer {document['management']['key']}")


def test_file_that_is_gone_or_broken_revokes_nothing(new, clock, config):
    keys = new()
    found = secrets_in(keys)
    for damage in (lambda: config.file.write_text("{no"), config.file.unlink):
        damage()
        clock[0] += LOOK_S
        keys.check("inference", f"Bearer {found['inference']}")


def test_named_keys_survive_a_restart_and_a_renewal(new, config):
    new()
    document = {**json.loads(config.file.read_text()), "alice": {"key": "a" * 40, "api": "management"}}
    write_private(config.file, document)
    again = new()
    again.renew("inference", f"Bearer {document['API']['key']}")
    assert secrets_in(again)["alice"] == "a" * 40
    again.check("management", "Bearer " + "a" * 40)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "needs a key"),
        ("Basic x", "is not Bearer KEY"),
        ("Bearer MANAGEMENT", "is for the management API"),
        ("Bearer " + "x" * 40, "is wrong, or was revoked"),
    ],
)
def test_refusal_names_the_reason_and_the_remedy(new, header, words):
    keys = new()
    header = header and header.replace("MANAGEMENT", secrets_in(keys)["management"])
    with pytest.raises(InvalidKey) as found:
        keys.check("inference", header)
    assert words in found.value.plain
    assert "flambeau keys show inference" in found.value.plain


def test_expired_key_is_named_as_such(new, clock):
    keys = new()
    clock[0] += 60
    with pytest.raises(InvalidKey) as found:
        keys.check("inference", f"Bearer {secrets_in(keys)['inference']}")
    assert "has expired, at 2023-11-14T22:14:20Z; `flambeau keys new inference`" in found.value.plain


def private(file, document):
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    file.chmod(0o600)


def test_renewal_that_cannot_be_written_leaves_the_old_key(new, monkeypatch):
    keys = new()
    old = secrets_in(keys)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flambeau.frontend.authorization.write_private", full)
    with pytest.raises(OSError, match="No space"):
        keys.renew("inference", f"Bearer {old['API']}")
    keys.check("inference", f"Bearer {old['inference']}")


def test_key_file_that_others_may_read_is_replaced(new, config, caplog):
    old = secrets_in(new())
    config.file.chmod(0o644)
    found = secrets_in(new())
    assert not {*old.values()} & {*found.values()}
    [(file, problem)] = logged(caplog, FILE_LOGGER)
    assert file == config.file
    assert "0644" in problem
    assert config.file.stat().st_mode & 0o777 == 0o600


def test_key_file_of_another_user_is_replaced(new, config, monkeypatch, caplog):
    old = secrets_in(new())
    monkeypatch.setattr("flambeau.frontend.authorization.os.geteuid", lambda: 4242)
    monkeypatch.setattr(
        "flambeau.frontend.authorization.os.fstat",
        lambda _: os.stat_result((0o100600, 1, 1, 1, 77, 77, 1, 1, 1, 1)),
    )
    assert not {*old.values()} & {*secrets_in(new()).values()}
    assert [file for file, _ in logged(caplog, FILE_LOGGER)] == [config.file]


def test_equal_keys_are_replaced(new, config, caplog):
    private(config.file, {kind: {"key": "A" * 40} for kind in ("management", "inference", "API")})
    assert len({*secrets_in(new()).values()} | {"A" * 40}) == 4
    assert [file for file, _ in logged(caplog, FILE_LOGGER)] == [config.file]


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "127.0.0.1:8080",
        "10.0.0.7",
        "[::1]:8080",
        "[fe80::1]",
        "localhost",
        "LOCALHOST.:8080",
        "app.localhost",
        "torchserve:8080",
        "models.default.svc:8080",
        "models.default.svc.cluster.local",
        "box.corp.example",
        "models.example.com",
    ],
)
def test_own_names_are_accepted(host):
    check = HostCheck(("models.example.com",), hostname="Box.corp.example")
    for _ in range(2):
        check.check(host, None)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:127.0.0.1", "x.models.com"],
)
def test_foreign_names_are_refused(host):
    check = HostCheck(("*.example.com", "models.com"), hostname="box")
    for _ in range(2):
        with pytest.raises(ForeignRequest, match="allowed_hosts"):
            check.check(host, None)


@pytest.mark.parametrize(
    ("host", "origin", "is_allowed"),
    [
        ("localhost:8080", "http://localhost:3000", True),
        ("127.0.0.1:8080", "http://localhost:3000", True),
        ("10.0.0.7:8080", "http://10.0.0.7:8081", True),
        ("10.0.0.7:8080", "https://App.example.org", True),
        ("10.0.0.7:8080", "http://10.0.0.8", False),
        ("10.0.0.7:8080", "http://localhost", False),
        ("localhost:8080", "http://192.0.2.1", False),
        ("localhost:8080", "https://evil.example", False),
        ("localhost:8080", "http://localhost.evil.example", False),
        ("localhost:8080", "null", False),
        ("localhost:8080", "", False),
        (None, "https://evil.example", False),
    ],
)
def test_pages_of_other_sites_are_refused(host, origin, is_allowed):
    check = HostCheck((), (("Access-Control-Allow-Origin", "https://app.example.org"),), hostname="box")
    if is_allowed:
        check.check(host, origin)
    else:
        with pytest.raises(ForeignRequest, match="cors_allowed_origin"):
            check.check(host, origin)


def test_any_name_and_any_page_can_be_allowed():
    check = HostCheck(("*",), (("Access-Control-Allow-Origin", "*"),), hostname="box")
    check.check("evil.example", "null")


def test_new_key_is_valid_at_once(new, clock, config):
    keys = new()
    with pytest.raises(InvalidKey):
        keys.check("inference", "Bearer " + "n" * 32)
    other = json.loads(config.file.read_text())
    other["inference"]["key"] = "n" * 32
    config.file.write_text(json.dumps(other))
    keys.check("inference", "Bearer " + "n" * 32)  # without a second between
