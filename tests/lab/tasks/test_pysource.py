from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from dynamix.errors import ConfigError
from dynamix_lab.tasks import make_workload
from dynamix_lab.tasks.pysource import CONTEXT, IGNORE, cut, make_data, source_files
from tests.refused import refused


def texts(arrays) -> list[bytes]:
    """The samples as they were cut, from inputs and targets."""
    found = []
    for row, target in zip(arrays.inputs, arrays.targets, strict=True):
        length = int((target != IGNORE).sum())
        assert (target[length:] == IGNORE).all()
        assert torch.equal(row[1:length], target[: length - 1])
        found.append(bytes([int(row[0]), *target[:length].tolist()]))
    return found


def test_samples_are_whole_lines_of_the_interpreters_own_library() -> None:
    data = make_data(0, train=300, test=50)
    library = {path.name: path.read_bytes() for path in source_files()}
    sample = texts(data.train)[0]
    assert any(sample in text for text in library.values())
    lengths = {len(text) for text in texts(data.train)}
    assert len(lengths) > 10, "samples differ in length, which is why they are weighted by bytes"
    assert max(lengths) <= CONTEXT + 1


def test_no_file_is_in_both_train_and_test(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"m{i:02}.py").write_text("".join(f"name_{i:02} = {j:03}\n" for j in range(60)))
    data = make_data(0, train=50, test=30, folder=tmp_path)
    files = [{text[5:7] for text in texts(part)} for part in (data.train, data.test)]
    assert all(files)
    assert not files[0] & files[1]


def test_files_are_listed_in_one_order_without_tests_and_installed_packages() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in source_files()]
    assert files == sorted(files, key=lambda path: path.as_posix())
    assert Path("argparse.py") in files
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in files)


def test_cutting_keeps_every_byte_but_lonely_ones() -> None:
    text = b"short\n" + b"x" * 50 + b"\n\n" + b"a = 1\n" * 5
    assert b"".join(cut(text, longest=16)) == text
    assert all(2 <= len(piece) <= 16 for piece in cut(text, longest=16))
    assert cut(b"") == []


def test_an_empty_folder_and_too_little_source_are_said(tmp_path: Path) -> None:
    refused(ConfigError, "standard library", make_data, 0, train=10, test=10, folder=tmp_path)
    (tmp_path / "one.py").write_text("a = 1\n" * 10)
    refused(ConfigError, "at most about", make_data, 0, train=10, test=10, folder=tmp_path)


@pytest.mark.parametrize("name", ["pysource", "pysource-lstm"])
def test_no_byte_sees_those_after_it(name: str) -> None:
    model = make_workload(name).make_model(0).eval()
    inputs = torch.randint(256, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    changed = inputs.clone()
    changed[:, 60:] = 7
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :, :60], after[:, :, :60])
    assert not torch.allclose(before[:, :, 60:], after[:, :, 60:])
