"""A first test, which runs on every backend that you name.

pip install multilock pytest
pytest docs/examples/testing/test_first.py
"""

from multilock import Client


def test_a_second_holder_is_refused(multilock_client: Client) -> None:
    with multilock_client.lock("report"):
        assert multilock_client.lock("report").try_acquire() is None
