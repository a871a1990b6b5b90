"""Access control: an API key for the ordinary routes, an admin key for those that change weights."""

from __future__ import annotations

import hmac
import ipaddress
import os

from tinyllm.errors import ConfigError
from tinyllm.serve.fields import APIError

API_KEY, ADMIN_KEY = "TINYLLM_API_KEY", "TINYLLM_ADMIN_KEY"


class Access:
    """Keys, compared in constant time. Without an API key the ordinary routes are open to whoever can connect."""

    def __init__(self, api_key: str | None, admin_key: str | None) -> None:
        self._api, self._admin = (key.encode() if key else None for key in (api_key, admin_key))

    def check(self, authorization: bytes, *, admin: bool, path: str) -> None:
        """Raises APIError: 401 for a wrong API key, 403 for a wrong admin key, 404 where there are no admin routes."""
        if admin and self._admin is None:
            raise APIError(
                f"{path} does not exist: this server has no admin key (start it with --admin-key or {ADMIN_KEY})",
                status=404,
                code="no_admin_key",
            )
        scheme, _, given = authorization.partition(b" ")
        given = given.strip() if scheme.lower() == b"bearer" else b""
        is_admin = self._admin is not None and hmac.compare_digest(given, self._admin)
        if admin and not is_admin:
            raise APIError(
                f"{path} needs the admin key; send the header Authorization: Bearer KEY",
                status=403,
                kind="permission_error",
                code="admin_key_needed",
            )
        is_user = self._api is None or hmac.compare_digest(given, self._api)
        if not (is_admin or is_user):
            raise APIError(
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
            )


def key_of(option: str, given: str | None, variable: str) -> str | None:
    """A key from the command line, else from the environment. Raises ConfigError for a key that no header can carry."""
    where = option if given is not None else variable
    key = given if given is not None else os.environ.get(variable) or None
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{where} must be visible ASCII characters, without spaces; choose another key")
    return key


def require_key(host: str, api_key: str | None) -> None:
    """Raises ConfigError for an address that others can reach, when there is no API key."""
    if api_key is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from elsewhere and there is no API key; set {API_KEY} (or --api-key), "
            "or leave --host out to listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
