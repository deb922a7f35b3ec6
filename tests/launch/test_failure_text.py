"""What a rank of torchrun prints when it fails: a traceback of its own error,
one line of a lost peer.
"""

from __future__ import annotations

import pytest

from meshwright.errors import CommunicationError
from meshwright_launch.failure import describe, text_of

LOST = [
    RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
        " [127.0.0.1]:39841"
    ),
    RuntimeError("NCCL communicator was aborted on rank 1.\nlast error: remote process exited"),
    type("DistNetworkError", (RuntimeError,), {})("failed to recv, got 0 bytes"),
]


@pytest.mark.parametrize("error", LOST)
def test_a_lost_peer_is_one_message(error: Exception) -> None:
    try:
        raise error
    except Exception as raised:
        failure = describe(raised, 1)
    text = text_of(failure)
    assert failure.lost_peer and len(text.splitlines()) == 1 and "Traceback" not in text
    assert text.startswith("lost a peer: ") and str(error).splitlines()[0] in text


def test_an_error_of_its_own_keeps_its_traceback() -> None:
    try:
        raise ZeroDivisionError("mine")
    except ZeroDivisionError as raised:
        assert "Traceback" in text_of(describe(raised, 1))
    own = CommunicationError("MW-MESH-001", "the all-reduce failed")
    assert text_of(describe(own, 1)) == "the all-reduce failed [MW-MESH-001]"
