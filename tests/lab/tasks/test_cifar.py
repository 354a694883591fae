"""Batches are written here as the authors' archive holds them: pickled by Python 2, protocol 2."""

from __future__ import annotations

import io
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from dynamix.errors import ConfigError
from dynamix_lab.tasks import make_workload, score
from dynamix_lab.tasks.cifar import FORMATS, make_data
from dynamix_lab.tasks.restricted import load_plain
from tests.refused import refused


class Python2Pickler(pickle._Pickler):
    """Writes str and bytes as Python 2 wrote its str, and NumPy's names of that time."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_string(self, value: str | bytes) -> None:
        raw = value.encode("latin1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string

    def save_global(self, obj: object, name: str | None = None) -> None:
        known = {"_reconstruct": "numpy.core.multiarray", "ndarray": "numpy", "dtype": "numpy"}
        called = name or obj.__name__
        self.write(f"c{known[called]}\n{called}\n".encode())
        self.memoize(obj)

    dispatch[type] = dispatch[type(len)] = dispatch[type(os.path.join)] = save_global


def written_by_python_2(value: object) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue()


def batch(images: int, labels: str, classes: int, seed: int) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (images, 3072), dtype=np.uint8)
    return {"batch_label": "one of them", labels: rng.integers(0, classes, images).tolist(), "data": pixels}


def write(folder: Path, data_set: str, images: int = 6) -> Path:
    form = FORMATS[data_set]
    place = folder / form.folder
    place.mkdir()
    for seed, name in enumerate(form.train + form.test):
        (place / name).write_bytes(written_by_python_2(batch(images, form.labels.decode(), form.classes, seed)))
    return place


@pytest.mark.parametrize(("data_set", "images"), [("cifar10", 30), ("cifar100", 6)])
def test_the_authors_batches_are_read_from_the_folder_or_the_one_above(
    tmp_path: Path, data_set: str, images: int
) -> None:
    place = write(tmp_path, data_set)
    for folder in (tmp_path, place):
        data = make_data(0, data_set=data_set, folder=folder)
        assert data.train.inputs.shape == (images, 3, 32, 32)
        assert data.train.inputs.dtype == torch.uint8
        assert len(data.test) == 6
    first = batch(6, "labels", FORMATS[data_set].classes, 0)
    assert data.train.inputs[2].flatten().tolist() == first["data"][2].tolist()
    assert data.train.targets[:6].tolist() == first["labels"]


@pytest.mark.parametrize("name", ["cifar10-vgg16", "cifar10-resnet34", "cifar100-vgg16", "cifar100-resnet34"])
def test_a_net_trains_and_scores_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write(tmp_path, name.partition("-")[0])
    monkeypatch.setenv("DYNAMIX_DATA", str(tmp_path))
    workload = make_workload(name, width=8)
    data = workload.make_data(1, train=5, test=4)
    assert (len(data.train), len(data.test)) == (5, 4)
    model = workload.make_model(0)
    optimizer = workload.make_optimizer(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    loss = workload.loss(model(data.train.inputs), data.train.targets)
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert 0 <= score(workload, model, data.test) <= 1


def test_batches_pickled_again_by_todays_python_are_read_too(tmp_path: Path) -> None:
    place = write(tmp_path, "cifar100")
    for protocol, name in ((2, "train"), (4, "test")):
        (place / name).write_bytes(pickle.dumps(batch(3, "fine_labels", 100, 0), protocol=protocol))
    assert len(make_data(0, data_set="cifar100", folder=place).train) == 3


def test_no_folder_and_an_incomplete_one_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMIX_DATA", raising=False)
    workload = make_workload("cifar10-vgg16")
    refused(ConfigError, r"cifar-10-batches-py.*DYNAMIX_DATA", workload.make_data, 0)
    place = write(tmp_path, "cifar10")
    (place / "data_batch_3").unlink()
    refused(ConfigError, "data_batch_3", make_data, 0, folder=place)
    refused(ConfigError, "mnist", make_data, 0, folder=tmp_path / "mnist")


class Attack:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_calls_something_is_refused_before_it_runs(tmp_path: Path, protocol: int) -> None:
    ran = tmp_path / "ran"
    for attack in (
        Attack(os.system, f"touch {ran}"),
        Attack(eval, f"open({str(ran)!r}, 'w')"),
        Attack(np.full, 10**9, 1.0),
    ):
        file = tmp_path / "batch"
        file.write_bytes(pickle.dumps({b"data": attack}, protocol=protocol))
        refused(ConfigError, "which plain data does not need", load_plain, file, fix="unpack it again")
    assert not ran.exists()


def corrupted(tmp_path: Path, content: bytes) -> ConfigError:
    place = write(tmp_path, "cifar10", images=2)
    (place / "test_batch").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        make_data(0, folder=place)
    assert "test_batch" in str(caught.value)
    assert "unpack" in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "EOFError"),
        (b"\x1f\x8b not unpacked", "Unpickling"),
        (written_by_python_2(batch(2, "labels", 10, 0))[:-2000], "pickle"),
        (pickle.dumps([1, 2]), "this is list"),
        (pickle.dumps({"pixels": 1}), "pixels"),
        (pickle.dumps({"data": [1], "labels": [1]}), "this is list"),
        (pickle.dumps({"data": np.zeros((2, 784), np.uint8), "labels": [1, 2]}, protocol=4), "784"),
        (pickle.dumps({"data": np.zeros((2, 3072)), "labels": [1, 2]}, protocol=4), "not of bytes"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]}, protocol=4), "0 to 9"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, protocol=4), "each of 2"),
    ],
)
def test_a_corrupt_file_is_one_clear_error(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in str(corrupted(tmp_path, content))


def test_more_images_than_there_are_is_said(tmp_path: Path) -> None:
    write(tmp_path, "cifar10", images=2)
    refused(ConfigError, "1 to 10", make_data, 0, train=11, folder=tmp_path)


@pytest.mark.parametrize(
    "state",
    [
        "(dS'array'\nI1\ns",  # a plain state, for __dict__
        "(N(dS'__call__'\nI1\nst",  # a state of slots, for setattr
    ],
)
def test_a_pickle_cannot_change_what_it_is_given(tmp_path: Path, state: str) -> None:
    file = tmp_path / "batch"
    for given in (
        "c_codecs\nencode\n",
        "cnumpy\ndtype\n",
        "cnumpy.core.multiarray\n_reconstruct\n",
        "cnumpy\nndarray\n",
    ):
        file.write_bytes(f"{given}{state}b.".encode())
        refused(ConfigError, "unpack it again", load_plain, file, fix="unpack it again")


def test_an_array_that_lies_about_itself_is_refused(tmp_path: Path) -> None:
    honest = pickle.dumps(np.zeros((2, 3), np.uint8), protocol=0)
    file = tmp_path / "batch"
    file.write_bytes(honest)
    assert load_plain(file, fix="unpack it again").shape == (2, 3)
    for wrong in (
        honest.replace(b"I2\n", b"I2000000000\n"),
        honest.replace(b"I2\n", b"I-7\n"),
        honest[: honest.rindex(b"(")] + b".",
    ):
        assert wrong != honest
        file.write_bytes(wrong)
        refused(ConfigError, "unpack it again", load_plain, file, fix="unpack it again")
