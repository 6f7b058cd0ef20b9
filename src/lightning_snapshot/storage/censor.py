"""Keeps credentials out of messages."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Censor"]

_SECRET_NAME = re.compile(r"secret|token|sas|key|password|credential|connection_string|authorization", re.IGNORECASE)
_SECRET_VARIABLES = re.compile(r"(AWS|AZURE|GOOGLE)_\w*(SECRET|TOKEN|KEY|CONNECTION_STRING|SAS)\w*")
# Signed addresses carry a signature behind the question mark.
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
_TAGGED = re.compile(r"<(StringToSign\w*|CanonicalRequest\w*|SignatureProvided|AWSAccessKeyId)>.*?</\1>", re.DOTALL)
_MAX_CHARACTERS = 600
_MIN_SECRET_CHARACTERS = 4


class Censor:
    """Takes out of a text what is nobody's business.

    Args:
        options: Those of a storage; values of all that sounds like a secret are taken out, and so are those of the
            environment.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._secrets = sorted({*_secrets_in(options)}, key=len, reverse=True)

    def __call__(self, text: object) -> str:
        """The text on one line, without secrets, and not too long."""
        # What follows is the same once more, for developers of the library.
        shown = str(text).partition("Debug source:")[0]
        shown = _TAGGED.sub("", _QUERY.sub(r"\1", shown))
        environment = [value for name, value in os.environ.items() if _SECRET_VARIABLES.fullmatch(name)]
        for secret in (*self._secrets, *environment):
            if len(secret) >= _MIN_SECRET_CHARACTERS:
                shown = shown.replace(secret, "***")
        shown = " ".join(shown.split())
        return shown if len(shown) <= _MAX_CHARACTERS else f"{shown[:_MAX_CHARACTERS]} …"

    def __reduce__(self) -> tuple[type["Censor"], tuple[dict[str, Any]]]:
        """A copy in another process knows the environment only."""
        return Censor, ({},)


def _secrets_in(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets_in(value)
        elif isinstance(value, str) and _SECRET_NAME.search(name):
            yield value
            # Parts of a connection string or SAS token: AccountKey=…, sig=….
            yield from re.findall(r"(?:Key|[Ss]ig\w*)=([^;&]+)", value)
