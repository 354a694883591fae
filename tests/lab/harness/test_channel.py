import threading

import pytest

from dynamix.errors import WorkerLostError
from dynamix_lab.harness.channel import JobChannel, Listener


@pytest.fixture
def ends(tmp_path):
    listener = Listener(tmp_path / "link")
    near = JobChannel.connect(tmp_path / "link")
    far = listener.accept(5.0)
    yield near, far
    near.close()
    far.close()
    listener.close()
    assert not (tmp_path / "link").exists()


def test_messages_arrive_whole_and_in_order_from_several_threads(ends):
    near, far = ends
    threads = [threading.Thread(target=lambda i=i: [near.send(str(i), n=n) for n in range(50)]) for i in range(4)]
    for thread in threads:
        thread.start()
    got = [far.receive(5.0) for _ in range(200)]
    for thread in threads:
        thread.join()
    for i in range(4):
        assert [m["n"] for m in got if m["kind"] == str(i)] == list(range(50))
    assert far.receive(0.0) is None


def test_a_vanished_other_end_is_an_error_after_its_last_words(ends):
    near, far = ends
    near.send("last")
    near.close()
    assert far.receive(1.0) == {"kind": "last"}
    with pytest.raises(WorkerLostError):
        far.receive(1.0)


def test_nobody_calling_is_no_error(tmp_path):
    listener = Listener(tmp_path / "link")
    assert listener.accept(0.0) is None
    listener.close()
