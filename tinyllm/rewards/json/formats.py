"""The formats of JSON Schema that can be checked, each in linear time; a schema with another format is refused."""

from __future__ import annotations

import datetime
import ipaddress
import re
import warnings
from collections.abc import Callable

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME = re.compile(r"([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.[0-9]+)?(?:[zZ]|[+-]([0-9]{2}):([0-9]{2}))")
_DURATION = re.compile(
    r"P(?:[0-9]+W|(?=[0-9T])(?:[0-9]+Y)?(?:[0-9]+M)?(?:[0-9]+D)?(?:T(?=[0-9])(?:[0-9]+H)?(?:[0-9]+M)?(?:[0-9]+S)?)?)"
)
_LOCAL = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*")
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_URI_CHARS = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9a-fA-F]{2})*")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)*")


def _is_read(reader: Callable[[str], object], text: str) -> bool:
    """Whether a function of the standard library can read the text."""
    try:
        reader(text)
    except (ValueError, re.error, RecursionError, OverflowError):
        return False
    return True


def date(text: str) -> bool:
    """RFC 3339 full-date."""
    return _DATE.fullmatch(text) is not None and _is_read(datetime.date.fromisoformat, text)


def time(text: str) -> bool:
    """RFC 3339 full-time, with its offset; second 60 only where a leap second can be (23:59 UTC)."""
    match = _TIME.fullmatch(text)
    if not match:
        return False
    hour, minute, second = int(match[1]), int(match[2]), int(match[3])
    off_hour, off_minute = int(match[4] or 0), int(match[5] or 0)
    if hour > 23 or minute > 59 or second > 60 or off_hour > 23 or off_minute > 59:
        return False
    sign = -1 if "+" in text else 1
    return second < 60 or (hour * 60 + minute + sign * (off_hour * 60 + off_minute)) % 1440 == 1439


def date_time(text: str) -> bool:
    """RFC 3339 date-time."""
    return len(text) > 11 and text[10] in "tT" and date(text[:10]) and time(text[11:])


def duration(text: str) -> bool:
    """ISO 8601 duration, as in RFC 3339 appendix A."""
    return _DURATION.fullmatch(text) is not None and text[-1] not in "PT"


def hostname(text: str) -> bool:
    """RFC 1123 host name."""
    return 0 < len(text) <= 253 and all(map(_LABEL.fullmatch, text.split(".")))


def email(text: str) -> bool:
    """RFC 5321 mailbox: dot-string at a host name."""
    local, at, domain = text.rpartition("@")
    return bool(at) and len(local) <= 64 and _LOCAL.fullmatch(local) is not None and hostname(domain)


def ipv4(text: str) -> bool:
    """IPv4 address as a dotted quad."""
    return text.isascii() and _is_read(ipaddress.IPv4Address, text)


def ipv6(text: str) -> bool:
    """RFC 4291 IPv6 address, without a zone."""
    return text.isascii() and "%" not in text and _is_read(ipaddress.IPv6Address, text)


def uri(text: str) -> bool:
    """RFC 3986 URI: a scheme and legal characters."""
    return _SCHEME.match(text) is not None and uri_reference(text)


def uri_reference(text: str) -> bool:
    """RFC 3986 reference: legal characters, one fragment."""
    return _URI_CHARS.fullmatch(text) is not None and text.count("#") <= 1


def regex(text: str) -> bool:
    """A pattern that Python can compile."""
    with warnings.catch_warnings(action="ignore"):  # about constructs whose meaning may change
        return _is_read(re.compile, text)


FORMATS: dict[str, Callable[[str], bool]] = {
    "date": date,
    "time": time,
    "date-time": date_time,
    "duration": duration,
    "email": email,
    "hostname": hostname,
    "ipv4": ipv4,
    "ipv6": ipv6,
    "uri": uri,
    "uri-reference": uri_reference,
    "uuid": lambda text: _UUID.fullmatch(text) is not None,
    "json-pointer": lambda text: _POINTER.fullmatch(text) is not None,
    "regex": regex,
}
