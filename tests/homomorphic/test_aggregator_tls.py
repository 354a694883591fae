"""TLS between workers and an aggregator: who has no certificate of the authority gets a clear error, and at once."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynamix.compression.wire import WireLost
from dynamix.errors import ConfigError
from dynamix_homomorphic import Aggregator
from dynamix_homomorphic.aggregator.client import AggregatorClient
from dynamix_homomorphic.aggregator.protocol import ADD, OR, parse_address
from dynamix_homomorphic.aggregator.server import AggregatorServer
from dynamix_homomorphic.aggregator.tls import TlsFiles
from dynamix_homomorphic.aggregator.wire import join
from tests.compression.local import in_threads
from tests.homomorphic.aggregators import SMALL, TOKEN, eventually
from tests.ranks import refusal, run_ranks

SCRIPT = Path(__file__).parents[2] / "examples/recipes/aggregator-certificates.sh"
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of two authorities, made as users make them: `here` names this machine, `other` does not."""
    made = tmp_path_factory.mktemp("certificates")
    for name, host in (("here", "127.0.0.1"), ("other", "aggregator.example")):
        subprocess.run(["sh", str(SCRIPT), str(made / name), host], check=True, capture_output=True, timeout=60)
    return made


def files_of(folder: Path, who: str) -> TlsFiles:
    return TlsFiles(str(folder / f"{who}.pem"), str(folder / f"{who}.key"), str(folder / "ca.pem"))


def worker_of(folder: Path, address: str) -> Aggregator:
    files = files_of(folder, "worker")
    return Aggregator(address, TOKEN, timeout_s=20, tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)


def connect(where: Aggregator, workers: int = 1, rank: int = 0, session: str = "s") -> AggregatorClient:
    return AggregatorClient.connect(where, session=session, workers=workers, rank=rank, patience_s=10)


@pytest.fixture
def secured(folder: Path) -> AggregatorServer:
    return AggregatorServer(token=TOKEN, tls=files_of(folder / "here", "aggregator"), limits=SMALL)


def test_sums_over_tls_equal_the_integers(secured: AggregatorServer, folder: Path) -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(-(2**31), 2**31, (3, 400_001)).astype(np.int32)
    bits = generator.integers(0, 256, (3, 5_000)).astype(np.uint8)

    def work(rank: int, client: AggregatorClient) -> None:
        total, union = values[rank].copy(), bits[rank].copy()
        client.reduce_((OR, union), (ADD, total.view(np.uint8)))
        assert np.array_equal(total, values.astype(np.int64).sum(0).astype(np.int32))
        assert np.array_equal(union, np.bitwise_or.reduce(bits))
        client.close()

    with secured:
        where = worker_of(folder / "here", secured.address)
        in_threads([connect(where, 3, rank) for rank in range(3)], work)
        eventually(lambda: secured.statistics()["jobs"]["done"] == 1)
        assert not secured.statistics()["failed"]


def test_who_has_no_certificate_of_the_authority_is_told_so_at_once(secured: AggregatorServer, folder: Path) -> None:
    here, other = files_of(folder / "here", "worker"), files_of(folder / "other", "worker")
    with secured:
        good = worker_of(folder / "here", secured.address)
        cases = {
            "not from the authority of tls_ca": worker_of(folder / "other", secured.address),
            "does not accept the certificate": replace(good, tls_cert=other.cert, tls_key=other.key),
            "pass tls_cert, tls_key and tls_ca": Aggregator(secured.address, TOKEN),
            "wrong token": replace(good, token="a token of wrong content"),
        }
        began = time.monotonic()
        for said, where in cases.items():
            with pytest.raises(WireLost, match=said):
                connect(where)
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.load_verify_locations(here.ca)
        plain = socket.create_connection(parse_address(secured.address), timeout=10)
        with (
            bare.wrap_socket(plain, server_hostname="127.0.0.1") as without,
            pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
        ):
            without.recv(1)
        assert time.monotonic() - began < 8, "nobody waits for a handshake to time out"
        eventually(lambda: secured.statistics()["refused"] == {"tls": 4, "token": 1})
        connect(good).reduce_((OR, np.ones(9, np.uint8)))


def made(folder: Path, name: str, usage: str, *signed: str) -> TlsFiles:
    """A certificate for `usage` that the recipe would not make: `signed` are options of `openssl x509`."""
    with_name = f"extendedKeyUsage={usage}\nsubjectAltName=IP:127.0.0.1\n"
    (folder / f"{name}.ext").write_text(with_name)
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=dynamix"]
    for command in (
        [*new, "-keyout", f"{name}.key", "-out", f"{name}.csr"],
        ["openssl", "x509", "-req", "-in", f"{name}.csr", "-extfile", f"{name}.ext", "-out", f"{name}.pem", *signed],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    return files_of(folder, name)


@pytest.mark.parametrize("wrong", ["purpose", "expired", "self-signed"])
def test_what_is_wrong_with_a_certificate_is_called_that_on_both_sides(
    wrong: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = folder / "here"
    authority = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
    signed = {"purpose": authority, "expired": [*authority, "-days", "-1"], "self-signed": ["-signkey", "{}.key"]}
    files = []
    for name, right, other in (("aggregator", "serverAuth", "clientAuth"), ("worker", "clientAuth", "serverAuth")):
        own = f"{wrong}-{name}"
        options = [option.format(own) for option in signed[wrong]]
        files.append(made(here, own, other if wrong == "purpose" else right, *options))
    seen, told = {
        "purpose": ("other side's certificate is of the wrong purpose.*serverAuth", "this side's.*the wrong purpose"),
        "expired": ("not valid at this time .*expired", "it has expired"),
        "self-signed": ("is self-signed, not from the authority of tls_ca", "it is not from its tls_ca"),
    }[wrong]
    aggregator, worker = files
    with (
        AggregatorServer(token=TOKEN, tls=aggregator) as server,
        pytest.raises(WireLost, match=seen),
    ):
        connect(worker_of(here, server.address))
    with AggregatorServer(token=TOKEN, tls=files_of(here, "aggregator")) as server:
        with pytest.raises(WireLost, match=told):
            connect(replace(worker_of(here, server.address), tls_cert=worker.cert, tls_key=worker.key))
        eventually(lambda: server.statistics()["refused"] == {"tls": 1})
    assert any(re.search(seen, line) for line in caplog.messages), caplog.messages


def test_an_old_version_of_tls_is_refused(secured: AggregatorServer, folder: Path) -> None:
    files = files_of(folder / "here", "worker")
    old = files.client()
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        secured,
        socket.create_connection(parse_address(secured.address), timeout=10) as plain,
        pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
    ):
        old.wrap_socket(plain, server_hostname="127.0.0.1")


def test_an_aggregator_of_another_name_or_without_tls_is_not_trusted(folder: Path) -> None:
    named_otherwise = AggregatorServer(token=TOKEN, tls=files_of(folder / "other", "aggregator"))
    with named_otherwise as server, pytest.raises(WireLost, match="subjectAltName"):
        connect(worker_of(folder / "other", server.address))
    with AggregatorServer(token=TOKEN) as server:
        began = time.monotonic()
        with pytest.raises(WireLost, match="does not speak TLS: start the aggregator with --tls-cert"):
            connect(worker_of(folder / "here", server.address))
        assert time.monotonic() - began < 5
        eventually(lambda: server.statistics()["refused"] == {"tls": 1})


def test_beyond_this_machine_token_and_tls_are_needed_on_both_sides(folder: Path) -> None:
    files = files_of(folder / "here", "aggregator")
    for token, tls in (("", None), (TOKEN, None), ("", files)):
        with pytest.raises(ConfigError, match=r"host='0.0.0.0'.*--token-file, --tls-cert, --tls-key and --tls-ca"):
            AggregatorServer("0.0.0.0", token=token, tls=tls)
    AggregatorServer("0.0.0.0", token=TOKEN, tls=files).close()
    for more in ({}, {"token": TOKEN}, {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}):
        with pytest.raises(ConfigError, match=r"10\.0\.0\.7.*pass token, tls_cert, tls_key and tls_ca"):
            Aggregator("10.0.0.7:5123", **more)
    worker_of(folder / "here", "10.0.0.7:5123")
    with pytest.raises(ConfigError, match="16 or more"):
        AggregatorServer(token="short")


def test_files_that_cannot_be_used_are_named(folder: Path, tmp_path: Path) -> None:
    here, other = files_of(folder / "here", "worker"), files_of(folder / "other", "worker")
    with pytest.raises(ConfigError, match=r"tls_key.*give all three"):
        Aggregator("127.0.0.1:1", tls_cert=here.cert, tls_ca=here.ca)
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", here.key, "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    (tmp_path / "empty.pem").touch()
    for broken, name in (
        (replace(here, ca=str(tmp_path / "nowhere.pem")), "tls_ca"),
        (replace(here, ca=str(tmp_path / "empty.pem")), "tls_ca"),
        (replace(here, key=other.key), "tls_cert"),
        (replace(here, key=str(locked)), "tls_cert"),
        (replace(here, cert=here.key), "tls_cert"),
    ):
        with pytest.raises(ConfigError, match=name):
            broken.client()
        with pytest.raises(ConfigError, match=name):
            AggregatorServer(tls=broken)


# on real ranks


def _join_all(rank: int, address: str, folder: Path) -> tuple[list[str], float]:
    """What each rank is told where one brings wrong files, and a sum over the aggregator where all bring the right."""
    group = dist.group.WORLD
    assert group is not None
    good, cpu = worker_of(folder / "here", address), torch.device("cpu")
    wrong = [worker_of(folder / "other", address), Aggregator(address, TOKEN)]
    wrong += [replace(good, tls_ca=str(folder / "nowhere.pem"))]
    said = [refusal(ConfigError, join, second if rank else good, group, cpu) for second in wrong]
    client = join(good, group, cpu)
    values = np.full(100_000, rank + 1, np.int32)
    client.reduce_((ADD, values.view(np.uint8)))
    return said, float(values.mean())


@pytest.mark.multiproc
def test_every_rank_is_told_what_is_wrong_with_the_files_of_one(secured: AggregatorServer, folder: Path) -> None:
    with secured:
        results = run_ranks(_join_all, 2, secured.address, folder)
    for said, mean in results:
        assert mean == 3.0
        for text, part in zip(said, ("authority of tls_ca", "by TLS only", "nowhere.pem"), strict=True):
            assert part in text
    assert "rank 1" in results[0][0][0]
