"""What a URL says of a server: redis://user:password@host:port/db?option=value."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from lowtide.core.units import parse_bytes
from lowtide.errors import BadArgument
from lowtide.tiers.medium import ALIGN_BYTES

SCHEMES = ("redis", "rediss")
PASSWORD_VARIABLE = "REDISCLI_AUTH"
"""Also used by redis-cli; a password in a URL is visible in the list of processes."""

_PORT = 6379
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
_OPTIONS = ("sockets", "timeout", "expiry", "chunk", *_TLS_OPTIONS)
_SECRET = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+://)[^/?#]*@")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUrl:
    """A server, the login, and the options.

    `sockets` is how many requests are under way at once, `expiry_s` how long keys outlive a process that was killed,
    `chunk_bytes` how many bytes a key holds. `tls`: the options of TLS (None: the connection is plain).
    """

    host: str
    port: int = _PORT
    user: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    sockets: int = 2
    timeout_s: float = 30.0
    expiry_s: int = 3600
    chunk_bytes: int = 512 << 10
    tls: dict[str, str] | None = None

    @property
    def place(self) -> str:
        """The server in messages, without a password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "redis" if self.tls is None else "rediss"
        return f"{scheme}://{host}:{self.port}" + (f"/{self.db}" if self.db else "")

    def tls_context(self) -> ssl.SSLContext | None:
        """Return how to encrypt (None: not at all)."""
        if self.tls is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls.get("ssl_ca_certs"))
            if self.tls.get("ssl_cert_reqs") == "none":
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if "ssl_certfile" in self.tls:
                context.load_cert_chain(self.tls["ssl_certfile"], self.tls.get("ssl_keyfile"))
        except (OSError, ssl.SSLError) as error:
            raise BadArgument(
                f"cannot use the certificates of {self.place}: {error}: check {', '.join(sorted(self.tls))}"
            ) from error
        return context


def hide_password(location: str) -> str:
    """Return a spill location without a user's name and password."""
    return _SECRET.sub(r"\1", location)


def read_server_url(url: str) -> ServerUrl:
    """Return what `url` says, or raise `BadArgument` with what it should be."""
    shown = hide_password(url)
    parts = urlsplit(url)
    try:
        port = _PORT if parts.port is None else parts.port
    except ValueError:
        raise BadArgument(f"cannot read the port in {shown!r}: write redis://host:{_PORT}") from None
    if not parts.hostname:
        raise BadArgument(f"no server in {shown!r}: write redis://host:{_PORT}")
    db = parts.path.strip("/")
    if (db and not db.isdecimal()) or parts.fragment:
        raise BadArgument(f"cannot read the database in {shown!r}: write a number, as in redis://host:{_PORT}/0")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    tls = parts.scheme.partition("+")[0] == "rediss"
    known = _OPTIONS if tls else tuple(name for name in _OPTIONS if name not in _TLS_OPTIONS)
    for name in options:
        if name not in known:
            raise BadArgument(f"unknown option {name!r} in {shown!r}: known are {', '.join(known)}")
    if options.get("ssl_cert_reqs", "required") not in ("none", "required"):
        raise BadArgument(f"ssl_cert_reqs={options['ssl_cert_reqs']!r} in {shown!r}: write none or required")
    return ServerUrl(
        host=parts.hostname,
        port=port,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or "") or os.environ.get(PASSWORD_VARIABLE, ""),
        db=int(db or 0),
        sockets=int(_number(options, "sockets", 2, least=1, most=64, shown=shown)),
        timeout_s=_number(options, "timeout", 30.0, least=0.001, most=86400, shown=shown),
        expiry_s=int(_number(options, "expiry", 3600, least=3, most=365 * 86400, shown=shown)),
        chunk_bytes=_chunk(options.get("chunk"), shown=shown),
        tls={name: options[name] for name in _TLS_OPTIONS if name in options} if tls else None,
    )


def _number(options: dict[str, str], name: str, default: float, *, least: float, most: float, shown: str) -> float:
    text = options.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most or (isinstance(default, int) and value != int(value)):
        raise BadArgument(f"{name}={text!r} in {shown!r}: write a number from {least:g} to {most:g}")
    return value


def _chunk(text: str | None, *, shown: str) -> int:
    if text is None:
        return 512 << 10
    try:
        nbytes = parse_bytes(text)
    except ValueError:
        nbytes = 0
    if nbytes % ALIGN_BYTES or not ALIGN_BYTES <= nbytes <= 512 << 20:
        raise BadArgument(f"chunk={text!r} in {shown!r}: write a multiple of {ALIGN_BYTES} bytes, such as 512KiB")
    return nbytes
