# SPDX-License-Identifier: Apache-2.0
"""Credentials of S3 from the shared file, which the client's own chain leaves out.

`obstore` looks at the environment's keys, a web identity (EKS service accounts), the container's and the
instance's credentials. In the order of the AWS SDKs the shared file stands between the second and the third:
https://docs.aws.amazon.com/sdkref/latest/guide/standardized-credentials.html
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from obstore.store import S3Credential

REREAD = timedelta(minutes=1)
"""A mounted Secret changes under us; the client asks again after this."""
_BEFORE = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")


class CredentialsFile:
    """Keys of one profile of a shared credentials file, read again now and then."""

    def __init__(self, path: Path, profile: str) -> None:
        self._path = path
        self._profile = profile

    def __call__(self) -> S3Credential:
        """Raises ValueError: the file cannot be read, or has no keys for the profile."""
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(self._path.read_text(encoding="utf-8"))
            section = parser[self._profile]
            credential: S3Credential = {
                "access_key_id": section["aws_access_key_id"],
                "secret_access_key": section["aws_secret_access_key"],
                "token": section.get("aws_session_token"),
                "expires_at": datetime.now(UTC) + REREAD,
            }
        except (OSError, UnicodeDecodeError, configparser.Error, KeyError) as error:
            # The parser's own text would quote the line, which may hold a key.
            raise ValueError(
                f"{self._path}: no keys of profile {self._profile} can be read ({type(error).__name__}); "
                "write aws_access_key_id and aws_secret_access_key under its name"
            ) from None
        return credential


def credentials_file(environment: Mapping[str, str] = os.environ) -> CredentialsFile | None:
    """The shared file if it is there and nothing of the environment comes before it."""
    if any(environment.get(name) for name in _BEFORE):
        return None
    named = environment.get("AWS_SHARED_CREDENTIALS_FILE")
    home = environment.get("HOME")
    path = Path(named) if named else Path(home) / ".aws" / "credentials" if home else None
    if path is None or not path.is_file():
        return None
    return CredentialsFile(path, environment.get("AWS_PROFILE") or "default")
