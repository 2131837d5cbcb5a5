"""Certificates: files that cannot be read, that do not go together, that are over; and what a server shows.

Whether a chain is to be trusted is asked of OpenSSL, by a handshake; nothing is decided here about that.
"""

import importlib
import socket
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_hieravg.doctor.findings import Finding, absent, note, ok, problem, warning
from elastic_hieravg.membership.etcd_client import EtcdSettings

HANDSHAKE_S = 3.0
DAY_S = 86400.0
SOON_S = 14 * DAY_S
SECRET_MODE = 0o007


@dataclass(frozen=True, slots=True)
class Certificate:
    """`since_s` and `until_s`: seconds since the epoch. `names`: whom it is for."""

    names: tuple[str, ...]
    since_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Shown:
    """What a server showed. `why`: it is not trusted, because; empty if it is."""

    certificate: Certificate | None
    why: str = ""


def check_files(settings: EtcdSettings, *, now_s: float) -> Iterator[Finding]:
    """The files of a client, one by one and against each other."""
    files = {"cacert": settings.cacert, "cert": settings.cert, "key": settings.key}
    if settings.cacert is None:
        yield absent("certificates", "no TLS")
        return
    unread = [finding for name, path in files.items() if path and (finding := _unreadable(name, path))]
    yield from unread
    for name in ("cacert", "cert"):
        path = files[name]
        if path is None or any(each.check == name for each in unread):
            continue
        certificate = read_certificate(path)
        if certificate is None:
            yield problem(name, f"{path} has no certificate", "give a PEM file, with BEGIN CERTIFICATE in it")
        else:
            yield judge(name, f"{path}", certificate, now_s=now_s)
    if settings.cert is not None and settings.key is not None and not unread:
        yield _pair(settings.cert, settings.key)


def judge(check: str, what: str, certificate: Certificate, *, now_s: float) -> Finding:
    """Whether it is the time of a certificate. Pure."""
    names = ", ".join(certificate.names) or "no names"
    days = (certificate.until_s - now_s) / DAY_S
    if days < 0:
        return problem(check, f"{what} ({names}) is over for {-days:.1f} days", "renew it")
    if now_s < certificate.since_s:
        later = (certificate.since_s - now_s) / DAY_S
        return problem(check, f"{what} ({names}) begins in {later:.1f} days", "is this machine's clock right?")
    found = f"{what} ({names}) for {days:.0f} more days"
    if days * DAY_S < SOON_S:
        return warning(check, found, "renew it before it is over: agents cannot come back after that")
    return ok(check, found)


def read_certificate(path: Path) -> Certificate | None:
    """The first certificate of a PEM file; None if there is none."""
    # The only reader in the standard library; it is for tests by its name, and pip vendors rely on it.
    decode = getattr(importlib.import_module("_ssl"), "_test_decode_cert", None)
    if decode is None:
        return None
    try:
        return _certificate(decode(str(path)))
    except (ssl.SSLError, OSError, ValueError):
        return None


def shown_by(host: str, port: int, settings: EtcdSettings) -> Shown:
    """What a server shows to whoever trusts `cacert`; `OSError` if it does not answer in TLS."""
    try:
        with _handshake(host, port, client_context(settings)) as sock:
            return Shown(_certificate(sock.getpeercert() or {}))
    except ssl.SSLCertVerificationError as exc:
        why = exc.verify_message or str(exc)
    curious = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing is sent over this one: it only asks again for what was not believed, to say what it is.
    curious.check_hostname = False
    curious.verify_mode = ssl.CERT_NONE
    if settings.cert is not None and settings.key is not None:
        # Without it some servers do not get as far as showing theirs.
        curious.load_cert_chain(settings.cert, settings.key)
    with _handshake(host, port, curious) as sock:
        der = sock.getpeercert(binary_form=True)
    return Shown(_from_der(der) if der else None, why)


def check_shown(endpoint: str, shown: Shown, *, now_s: float) -> Finding:
    """Pure."""
    check = f"certificate of {endpoint}"
    certificate = shown.certificate
    if shown.why:
        names = ", ".join(certificate.names) if certificate else "unknown"
        advice = "cacert has to be of who signed it, and its names have to have this endpoint's"
        if certificate is not None and now_s > certificate.until_s:
            advice = "renew the certificate of etcd"
        return problem(check, f"not trusted: {shown.why}; it is for {names}", advice)
    if certificate is None:
        return note(check, "trusted; its dates cannot be read")
    return judge(check, "trusted", certificate, now_s=now_s)


def client_context(settings: EtcdSettings) -> ssl.SSLContext:
    """As the agents connect."""
    assert settings.cacert is not None
    context = ssl.create_default_context(cafile=str(settings.cacert))
    if settings.cert is not None and settings.key is not None:
        context.load_cert_chain(settings.cert, settings.key)
    return context


def _handshake(host: str, port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    plain = socket.create_connection((host, port), timeout=HANDSHAKE_S)
    try:
        return context.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise


def _unreadable(name: str, path: Path) -> Finding | None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as exc:
        advice = "give the path of a PEM file that this user may read"
        return problem(name, f"{path} cannot be read: {exc.strerror}", advice)
    if name == "key" and path.stat().st_mode & SECRET_MODE:
        return warning(name, f"{path} can be read by everybody on this machine", f"chmod 600 {path}")
    return None


def _pair(cert: Path, key: Path) -> Finding:
    try:
        # A password would be asked for at the terminal; there is none to give.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError) as exc:
        reason = getattr(exc, "reason", None) or str(exc)
        return problem(
            "cert and key", f"they do not go together: {reason}", f"give the key that {cert} was made for"
        )
    return ok("cert and key", "they go together")


def _from_der(der: bytes) -> Certificate | None:
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(ssl.DER_cert_to_PEM_cert(der))
        file.flush()
        return read_certificate(Path(file.name))


def _certificate(decoded: Mapping[str, object]) -> Certificate | None:
    since, until = decoded.get("notBefore"), decoded.get("notAfter")
    if not isinstance(since, str) or not isinstance(until, str):
        return None
    return Certificate(
        _names(decoded.get("subjectAltName")) or _names(_flat(decoded.get("subject"))),
        float(ssl.cert_time_to_seconds(since)),
        float(ssl.cert_time_to_seconds(until)),
    )


def _flat(subject: object) -> tuple[object, ...]:
    return tuple(pair for part in subject for pair in part) if isinstance(subject, tuple) else ()


def _names(pairs: object) -> tuple[str, ...]:
    return tuple(str(pair[1]) for pair in pairs) if isinstance(pairs, tuple) else ()
