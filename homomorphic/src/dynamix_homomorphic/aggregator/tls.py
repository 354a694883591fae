"""TLS 1.3 between workers and aggregator: both sides show a certificate of the same authority.

Also the operations in which sockets with and without TLS differ, so that other modules need not distinguish them.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass
from os import PathLike, fspath

from dynamix.errors import ConfigError

PathText = str | PathLike[str]
FIRST_BYTE = 0x16  # of every TLS connection; no message of ours begins with it
SPEAK_TLS = "pass tls_cert, tls_key and tls_ca to Aggregator(...)"
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_SELF_SIGNED = 18  # OpenSSL's error number
_RECORD_BYTES = 1 << 14  # the largest record that TLS encrypts at once

_PURPOSE = "the aggregator's must be made for serverAuth, a worker's for clientAuth"
_WHY = {  # explanations by OpenSSL's name of the error
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the worker showed no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": f"the aggregator asks for a certificate: {SPEAK_TLS}",
    "TLSV1_ALERT_UNKNOWN_CA": "the other side does not accept the certificate: it is not from its tls_ca",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other side does not accept the certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the other side does not accept the certificate: it has expired",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": f"this side's certificate is of the wrong purpose: {_PURPOSE}",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the other side does not accept the certificate",
    "WRONG_VERSION_NUMBER": "what answers there does not speak TLS: start the aggregator with --tls-cert, --tls-key "
    "and --tls-ca",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other side does not speak TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "the other side does not speak TLS 1.3",
}


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one side: its certificate, the certificate's key, and the authority that both sides trust."""

    cert: str
    key: str
    ca: str

    @classmethod
    def of(cls, cert: PathText | None, key: PathText | None, ca: PathText | None) -> TlsFiles | None:
        """The three files, or None if none is given. Raises `ConfigError` if only some are given."""
        given = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
        missing = [name for name, path in given.items() if not path]
        if len(missing) == 3:
            return None
        if missing or cert is None or key is None or ca is None:
            raise ConfigError(
                missing[0], "", "tls_cert, tls_key and tls_ca together, or none of them", "give all three"
            )
        return cls(fspath(cert), fspath(key), fspath(ca))

    def server(self) -> ssl.SSLContext:
        """The aggregator's side: a client must show a certificate of the authority. Raises `ConfigError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # sessions are never resumed
        return self._filled(context)

    def client(self) -> ssl.SSLContext:
        """A worker's side: the aggregator must show a certificate of the authority, for the host that was called."""
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        allowed = "PEM files that can be read, a key that belongs to its certificate and has no passphrase"
        try:
            context.load_verify_locations(cafile=self.ca)
        except (OSError, ValueError) as error:
            raise ConfigError("tls_ca", self.ca, allowed, str(error)) from error
        try:
            context.load_cert_chain(self.cert, self.key, password="")  # without a password it would ask on the terminal
        except (OSError, ValueError) as error:
            raise ConfigError("tls_cert", f"{self.cert} with tls_key={self.key}", allowed, str(error)) from error
        return context


def explained(error: Exception) -> str:
    """The fault of a connection, with advice if the cause is recognised."""
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message
        if "mismatch" in said:
            return f"the certificate is for another host ({said}): list this one in its subjectAltName"
        if "expired" in said or "not yet valid" in said:
            return f"the certificate is not valid at this time ({said})"
        if "purpose" in said:
            return f"the other side's certificate is of the wrong purpose ({said}): {_PURPOSE}"
        if error.verify_code == _SELF_SIGNED:
            return f"the certificate is self-signed, not from the authority of tls_ca ({said})"
        return f"the certificate is not from the authority of tls_ca ({said})"
    if isinstance(error, ssl.SSLError) and error.reason in _WHY:
        return _WHY[error.reason]
    return str(error)


def shut(sock: socket.socket) -> None:
    """End a connection from any thread. A thread that uses it at the time sees it end."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # SSLSocket's own shutdown would fall back to plain text


def buffered(sock: socket.socket) -> int:
    """Bytes that TLS has already read from the kernel. No selector reports them."""
    return sock.pending() if isinstance(sock, ssl.SSLSocket) else 0


def send_both(sock: socket.socket, first: bytes, rest: memoryview) -> int:
    """Send as much of `first` and then `rest` as possible at once. Returns the bytes sent, at least one, or raises."""
    if isinstance(sock, ssl.SSLSocket):
        return sock.send(first + rest[: _RECORD_BYTES - len(first)])
    return sock.sendmsg([first, rest])


def is_closed(sock: socket.socket) -> bool:
    """Whether the other side has closed the connection. Reads nothing from it."""
    try:
        return not socket.socket.recv(sock, 1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
