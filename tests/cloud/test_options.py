"""Storage options: what users call them, and that nobody reads a secret anywhere."""

import json
import logging
import pickle
import subprocess
import sys
from datetime import timedelta

import pytest

from lightning_snapshot import Snapshot, SnapshotCheckpointIO
from lightning_snapshot.errors import NotASnapshotError, UnsupportedFeatureError
from lightning_snapshot.storage import open_storage
from lightning_snapshot.storage.censor import Censor
from lightning_snapshot.storage.cloud import open_bucket
from lightning_snapshot.storage.cloud_options import settings_for
from tests.cloud.servers import AZURE_KEY, SECRET


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch, tmp_path):
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


KEYS = {"access_key_id": "k", "secret_access_key": "s"}


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, {}),
        ({"key": "k", "secret": "s"}, KEYS),
        (KEYS, KEYS),
        ({"key": "k", "secret": "s", "token": "t"}, {**KEYS, "session_token": "t"}),
        ({"anon": True}, {"skip_signature": True}),
        ({"endpoint_url": "https://h"}, {"endpoint": "https://h"}),
        (
            {"client_kwargs": {"endpoint_url": "https://h", "region_name": "r"}},
            {"endpoint": "https://h", "region": "r"},
        ),
        ({"client_kwargs": {"aws_access_key_id": "k", "aws_secret_access_key": "s"}}, KEYS),
        ({"config": {"region": "r"}}, {"region": "r"}),
        ({"key": None, "requester_pays": True}, {"request_payer": True}),
        ({"use_listings_cache": False, "default_block_size": 5}, {}),
    ],
)
def test_names_for_s3(options, config):
    assert settings_for("s3", "b", options).config == config


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"account_name": "a", "account_key": "k"}, {"account_name": "a", "account_key": "k"}),
        ({"account_name": "a", "sas_token": "t"}, {"account_name": "a", "sas_key": "t"}),
        (
            {"connection_string": "AccountName=a;AccountKey=k==;BlobEndpoint=https://h/a"},
            {"account_name": "a", "account_key": "k==", "endpoint": "https://h/a"},
        ),
        ({"connection_string": "UseDevelopmentStorage=true"}, {"use_emulator": True}),
    ],
)
def test_names_for_azure(options, config):
    assert settings_for("az", "b", options).config == config


def test_an_account_in_an_azure_url():
    settings = settings_for("abfss", "box@acct.dfs.core.windows.net", {})
    assert (settings.bucket, settings.config) == ("box", {"account_name": "acct"})


def test_names_for_google(tmp_path):
    (tmp_path / "key.json").write_text("{}")
    path = str(tmp_path / "key.json")
    assert settings_for("gs", "b", {"token": "anon", "project": "p"}).config == {"skip_signature": True}
    assert settings_for("gcs", "b", {"token": path}).config == {"application_credentials": path}
    assert json.loads(settings_for("gs", "b", {"token": {"x": 1}}).config["service_account_key"]) == {"x": 1}
    assert settings_for("gs", "b", {"token": "google_default"}).config == {}
    provider = settings_for("gs", "b", {"token": "ya29.abc"}).credential_provider
    assert provider()["token"] == "ya29.abc"  # noqa: S105  # of a test


def test_profiles_of_the_aws_command_line(monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text("[work]\naws_access_key_id = k\naws_secret_access_key = s\n")
    (tmp_path / "config").write_text("[profile work]\nregion = r\noutput = json\n")
    assert settings_for("s3", "b", {"profile": "work"}).config == {**KEYS, "region": "r"}
    with pytest.raises(UnsupportedFeatureError, match=r"profile 'play'.*export-credentials"):
        settings_for("s3", "b", {"profile": "play"})
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert settings_for("s3", "b", {}).config == {**KEYS, "region": "r"}


def test_the_connection():
    options = {"endpoint_url": "http://h", "headers": {"x": "y"}, "timeout": "9s", "client_kwargs": {"verify": False}}
    client = settings_for("s3", "b", options).client_options
    expected = {"allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers", "timeout"}
    assert client.keys() == expected
    assert (client["timeout"], client["default_headers"], client["allow_http"]) == ("9s", {"x": "y"}, True)
    retry = settings_for("s3", "b", {"retry_config": {"retry_timeout": 5, "max_retries": 2}}).retry_config
    assert retry == {"retry_timeout": timedelta(seconds=5), "max_retries": 2}
    settings = settings_for("s3", "b", {"part_bytes": 1, "max_concurrency": 3})
    assert (settings.part_bytes, settings.max_concurrency) == (5 * 2**20, 3)  # the least that S3 takes


@pytest.mark.parametrize("url", ["s3://b/x", "gs://b/x", "az://b/x"])
def test_unknown_names_are_listed(url):
    with pytest.raises(
        UnsupportedFeatureError, match=r"storage options among \[.*part_bytes.*\], found \['colour', 'flavour'\]"
    ):
        open_storage(url, {"flavour": "x", "colour": SECRET})


def test_a_url_without_a_bucket_is_refused():
    with pytest.raises(NotASnapshotError, match="name of a bucket"):
        open_storage("s3:///x")


def test_there_is_one_client_for_a_bucket(monkeypatch):
    options = {"key": "k", "secret": "s", "client_kwargs": {"region_name": "r"}}
    first = open_bucket("s3", "b", options)
    assert open_bucket("s3", "b", dict(reversed(options.items()))) is first
    assert open_storage("s3://b/x", options).place.bucket is first
    assert open_bucket("s3", "b", {**options, "secret": "other"}) is not first
    assert open_bucket("s3", "c", options) is not first
    monkeypatch.setenv("AWS_REGION", "elsewhere")
    assert open_bucket("s3", "b", options) is not first


# --- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"secret": SECRET}, f"the key {SECRET} is wrong"),
        ({"client_kwargs": {"aws_secret_access_key": SECRET}}, f"<SecretKey>{SECRET}</SecretKey>"),
        ({"connection_string": f"AccountName=a;AccountKey={SECRET}"}, f"bad signature with {SECRET}"),
        ({"sas_token": f"sv=1&sig={SECRET}"}, f"got {SECRET}"),
        ({}, f"GET https://host/bucket/key?X-Amz-Signature={SECRET} failed"),
        ({}, f"<Error><StringToSign>AWS4 {SECRET}</StringToSign></Error>"),
        ({}, f"short Debug source: and long {SECRET}"),
    ],
)
def test_secrets_are_taken_out_of_messages(options, text):
    assert SECRET in text
    assert SECRET not in Censor(options)(text)
    assert len(Censor(options)(text * 1000)) < 1000


def test_secrets_of_the_environment_are_taken_out(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert SECRET not in Censor({})(f"denied: {SECRET}")


def test_nobody_reads_a_secret(cloud, caplog, recwarn):
    caplog.set_level(logging.DEBUG)
    secrets = {SECRET, AZURE_KEY}
    assert secrets & {str(value) for value in cloud.options.values()} or cloud.server.scheme == "gs"
    plugin = SnapshotCheckpointIO(storage_options=cloud.options)
    plugin.save_checkpoint({"x": 1}, f"{cloud.folder}/x")
    storage = open_storage(f"{cloud.folder}/x", cloud.options)
    snapshot = Snapshot(f"{cloud.folder}/x", storage_options=cloud.options)
    texts = [
        *map(repr, (plugin, storage, storage.place, storage.place.bucket, snapshot, plugin.last_save)),
        caplog.text,
    ]
    texts += [str(warning.message) for warning in recwarn]
    texts += [storage.place.read(name).decode("latin-1") for name in storage.place.files()]
    with pytest.raises(FileNotFoundError) as caught:
        plugin.load_checkpoint(f"{cloud.folder}/nothing")
    texts.append(str(caught.value))
    assert not [text for text in texts for secret in secrets if secret in text]
    assert SECRET not in repr(pickle.dumps(Censor(cloud.options)))


# --- forks -----------------------------------------------------------------------------------------------------------

_FORK = """
import os, sys
from lightning_snapshot.errors import UnsupportedFeatureError
from lightning_snapshot.storage import open_storage
options = {"endpoint_url": sys.argv[1], "key": "k", "secret": "s"}
storage = open_storage("s3://models/fork", options)
storage.is_snapshot()
child = os.fork()
if child == 0:
    try:
        open_storage("s3://models/fork", options).is_snapshot()
    except UnsupportedFeatureError as error:
        os._exit(0 if "forked" in str(error) else 1)
    os._exit(2)
print(os.waitpid(child, 0)[1])
"""


def test_a_forked_process_is_told_instead_of_hanging(s3):
    command = [sys.executable, "-W", "ignore", "-c", _FORK, s3.server.endpoint]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "0\n"
