"""A server's process: what is said where it does not start."""

import pytest

from rlm.cli import UsageError
from rlm.serving import server_process


def test_a_server_that_ends_is_said_in_one_line(tmp_path):
    log = tmp_path / "server.log"
    with (
        pytest.raises(UsageError, match=r"the server did not start; .*server\.log says why"),
        server_process(["-c", "print('no')"], log=log),
    ):
        pass
    assert log.read_text() == "no\n"
