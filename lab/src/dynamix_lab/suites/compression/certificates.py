"""Certificates for aggregators that a measurement starts, made by the command `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dynamix_homomorphic.aggregator.tls import TlsFiles

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def have_openssl() -> bool:
    """Whether certificates can be made on this machine."""
    return shutil.which("openssl") is not None


def make_certificates(folder: Path, address: str) -> tuple[TlsFiles, TlsFiles]:
    """Files of an aggregator at the IP address `address`, and of its workers. Their authority signs nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    ca = folder / "ca.pem"
    _openssl(
        *("req", "-x509", *_KEY, "-days", "7", "-subj", "/CN=dynamix bench"),
        *("-keyout", str(folder / "ca.key"), "-out", str(ca), "-addext", "keyUsage=critical,keyCertSign"),
    )
    aggregator = _certify(folder, "aggregator", ("extendedKeyUsage=serverAuth", f"subjectAltName=IP:{address}"))
    return aggregator, _certify(folder, "worker", ("extendedKeyUsage=clientAuth",))


def _certify(folder: Path, name: str, extensions: Sequence[str]) -> TlsFiles:
    cert, key, request, more = (folder / f"{name}.{end}" for end in ("pem", "key", "csr", "ext"))
    more.write_text("\n".join(extensions) + "\n")
    _openssl("req", *_KEY, "-subj", f"/CN=dynamix {name}", "-keyout", str(key), "-out", str(request))
    signing = ("-CA", str(folder / "ca.pem"), "-CAkey", str(folder / "ca.key"), "-CAcreateserial")
    _openssl("x509", "-req", "-in", str(request), *signing, "-days", "7", "-extfile", str(more), "-out", str(cert))
    return TlsFiles(str(cert), str(key), str(folder / "ca.pem"))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
