"""What users call the options of object stores, and what obstore calls them."""

import configparser
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from lightning_snapshot.errors import NotASnapshotError, UnsupportedFeatureError

__all__ = ["SCHEMES", "Settings", "settings_for"]

_S3, _GCS, _AZURE = "S3Store", "GCSStore", "AzureStore"
SCHEMES = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GCS,
    "gcs": _GCS,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "adl": _AZURE,
    "azure": _AZURE,
}
"""Protocol of a URL → class of obstore."""

_MIB = 1024 * 1024


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What obstore itself understands.
_CONFIG = {
    _S3: _words(
        "access_key_id bucket checksum_algorithm conditional_put container_credentials_relative_uri "
        "copy_if_not_exists default_region disable_tagging endpoint imdsv1_fallback metadata_endpoint region "
        "request_payer s3_express secret_access_key server_side_encryption session_token skip_signature "
        "sse_bucket_key_enabled sse_customer_key_base64 sse_kms_key_id unsigned_payload "
        "virtual_hosted_style_request"
    ),
    _GCS: _words("application_credentials service_account service_account_key skip_signature"),
    _AZURE: _words(
        "account_key account_name authority_host client_id client_secret disable_tagging endpoint "
        "federated_token_file msi_endpoint msi_resource_id object_id sas_key skip_signature tenant_id token "
        "use_azure_cli use_emulator use_fabric_endpoint"
    ),
}
# Names of fsspec and its implementations → those of obstore.
_NAMES = {
    _S3: {
        "anon": "skip_signature",
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "endpoint_url": "endpoint",
        "key": "access_key_id",
        "region_name": "region",
        "requester_pays": "request_payer",
        "secret": "secret_access_key",
        "token": "session_token",
    },
    _GCS: {"service_account_file": "application_credentials", "anon": "skip_signature"},
    _AZURE: {
        "account_host": "endpoint",
        "anon": "skip_signature",
        "endpoint_url": "endpoint",
        "sas_token": "sas_key",
    },
}
_CLIENT = _words(
    "allow_http allow_invalid_certificates connect_timeout default_content_type default_headers "
    "http1_only http2_only pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate proxy_excludes "
    "proxy_url randomize_addresses read_timeout root_certificate timeout user_agent"
)
_DURATIONS = _words("init_backoff max_backoff retry_timeout")
_OURS = frozenset(
    {"client_kwargs", "client_options", "config", "headers", "max_concurrency", "part_bytes", "retry_config"}
)
_SPECIAL = {
    _S3: frozenset({"profile", "use_ssl"}),
    _GCS: frozenset({"endpoint_url", "token"}),
    _AZURE: frozenset({"connection_string"}),
}
# How fsspec caches and schedules, and what obstore need not be told.
_IGNORED = _words(
    "asynchronous auto_mkdir batch_size block_size cache_options cache_regions cache_timeout cache_type "
    "consistency default_block_size default_cache_type default_fill_cache listings_expiry_time loop "
    "max_paths project skip_instance_cache use_listings_cache version_aware"
)


@dataclass(slots=True)
class Settings:
    """How a bucket is reached.

    Attributes:
        kind: Class of obstore.
        bucket: Its name.
        config: What obstore is told of the store.
        client_options: What it is told of the connection.
        retry_config: How often it tries again.
        credential_provider: Gives credentials when they are needed.
        part_bytes: Larger objects are uploaded in parts of this size.
        max_concurrency: Requests under way at once.
    """

    kind: str
    bucket: str
    config: dict[str, Any] = field(default_factory=dict)
    client_options: dict[str, Any] = field(default_factory=lambda: {"connect_timeout": "10s", "timeout": "120s"})
    retry_config: dict[str, Any] = field(default_factory=dict)
    credential_provider: Callable[[], Any] | None = None
    part_bytes: int = 6 * _MIB
    max_concurrency: int = 8


def settings_for(protocol: str, bucket: str, options: Mapping[str, Any]) -> Settings:
    """Understand the options of an object store.

    Args:
        protocol: One of `SCHEMES`.
        bucket: What stands between ``//`` and ``/`` in the URL.
        options: Names of obstore, of fsspec and its implementations, or of torchsnapshot.

    Raises:
        NotASnapshotError: There is no name of a bucket.
        UnsupportedFeatureError: An option has no meaning here.
    """
    kind = SCHEMES[protocol]
    name, _, host = bucket.partition("@")
    settings = Settings(kind, name)
    if not name:
        msg = f"expected the name of a bucket in {protocol}://, found none"
        raise NotASnapshotError(msg)
    if host:  # abfs://container@account.dfs.core.windows.net
        settings.config["account_name"] = host.partition(".")[0]
    given = {key: value for key, value in options.items() if value is not None}
    _take_nested(settings, given)
    names = _NAMES[kind]
    unknown = []
    for key, value in given.items():
        if key in _CLIENT:
            settings.client_options[key] = value
        elif key in _SPECIAL[kind]:
            _SPECIALLY[key](settings, value)
        elif names.get(key, key) in _CONFIG[kind]:
            settings.config[names.get(key, key)] = value
        elif key not in _IGNORED:
            unknown.append(key)
    if unknown:
        known = sorted({*_CONFIG[kind], *names, *_CLIENT, *_OURS, *_SPECIAL[kind]})
        msg = f"{protocol}://{name}: expected storage options among {known}, found {sorted(unknown)}"
        raise UnsupportedFeatureError(msg)
    _FROM_ENVIRONMENT[kind](settings)
    endpoint = str(settings.config.get("endpoint") or "")
    if endpoint.startswith("http://"):
        settings.client_options.setdefault("allow_http", True)
    return settings


def _take_nested(settings: Settings, given: dict[str, Any]) -> None:
    """Take the options that are not obstore's, and flatten those that are in groups."""
    settings.part_bytes = max(5 * _MIB, int(given.pop("part_bytes", settings.part_bytes)))
    settings.max_concurrency = max(1, int(given.pop("max_concurrency", settings.max_concurrency)))
    settings.retry_config.update(_with_durations(given.pop("retry_config", {})))
    settings.client_options.update(given.pop("client_options", {}))
    settings.config.update(given.pop("config", {}))
    headers = given.pop("headers", None)
    if headers:
        settings.client_options["default_headers"] = dict(headers)
    inner = dict(given.pop("client_kwargs", {}))
    if "verify" in inner:
        settings.client_options["allow_invalid_certificates"] = inner.pop("verify") is False
    given.update(inner)


def _with_durations(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of retries in which times may be numbers of seconds."""
    return {
        key: _with_durations(value)
        if isinstance(value, Mapping)
        else timedelta(seconds=value)
        if key in _DURATIONS and isinstance(value, (int, float))
        else value
        for key, value in config.items()
    }


def _use_profile(settings: Settings, profile: str) -> None:
    """Take static credentials and the region from the files that the command line of AWS writes."""
    found: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", profile if profile == "default" else f"profile {profile}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", profile),
    ):
        parser = configparser.RawConfigParser()
        parser.read(os.path.expanduser(os.environ.get(variable, default)))
        if parser.has_section(section):
            found.update(parser.items(section))
    names = {**_NAMES[_S3], "region": "region"}
    for key, value in found.items():
        if key in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "region", "endpoint_url"):
            settings.config.setdefault(names[key], value)
    if "access_key_id" not in settings.config:
        msg = (
            f"s3://{settings.bucket}: expected the profile {profile!r} with aws_access_key_id in the files of the AWS "
            "command line, found none; put the credentials into the environment, for example with "
            f"`aws configure export-credentials --profile {profile} --format env`"
        )
        raise UnsupportedFeatureError(msg)


def _use_ssl(settings: Settings, value: bool) -> None:  # noqa: FBT001  # the value of an option
    settings.client_options["allow_http"] = not value


def _use_google_token(settings: Settings, token: Any) -> None:
    """Understand ``token`` as gcsfs does."""
    if token == "anon":  # noqa: S105  # a word, no password
        settings.config["skip_signature"] = True
    elif isinstance(token, Mapping):
        settings.config["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, str) and os.path.isfile(os.path.expanduser(token)):
        settings.config["application_credentials"] = os.path.expanduser(token)
    elif isinstance(token, str) and token not in ("cloud", "google_default", "cache"):
        settings.credential_provider = lambda: {"token": token, "expires_at": None}


def _use_google_endpoint(settings: Settings, url: str) -> None:
    # An emulator: obstore is told of it in the place of a key, and then asks for no credentials.
    key = {
        "client_email": "",
        "disable_oauth": True,
        "gcs_base_url": url.rstrip("/"),
        "private_key": "",
        "private_key_id": "",
    }
    settings.config["service_account_key"] = json.dumps(key)
    settings.client_options.setdefault("allow_http", url.startswith("http://"))


def _use_connection_string(settings: Settings, text: str) -> None:
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    names = {
        "AccountKey": "account_key",
        "AccountName": "account_name",
        "BlobEndpoint": "endpoint",
        "SharedAccessSignature": "sas_key",
    }
    settings.config.update({names[key]: value for key, value in parts.items() if key in names})
    if parts.get("UseDevelopmentStorage", "").lower() == "true":
        settings.config["use_emulator"] = True


_SPECIALLY: dict[str, Callable[[Settings, Any], None]] = {
    "connection_string": _use_connection_string,
    "endpoint_url": _use_google_endpoint,
    "profile": _use_profile,
    "token": _use_google_token,
    "use_ssl": _use_ssl,
}


def _s3_environment(settings: Settings) -> None:
    has_keys = {"access_key_id", "skip_signature"} & settings.config.keys() or "AWS_ACCESS_KEY_ID" in os.environ
    if not has_keys and "AWS_PROFILE" in os.environ:
        _use_profile(settings, os.environ["AWS_PROFILE"])
    for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if variable in os.environ:
            settings.config.setdefault("endpoint", os.environ[variable])


def _google_environment(settings: Settings) -> None:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator and "service_account_key" not in settings.config:
        _use_google_endpoint(settings, emulator if "://" in emulator else f"http://{emulator}")


def _azure_environment(settings: Settings) -> None:
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    if text and not {"account_name", "account_key", "sas_key"} & settings.config.keys():
        _use_connection_string(settings, text)


_FROM_ENVIRONMENT = {_S3: _s3_environment, _GCS: _google_environment, _AZURE: _azure_environment}
