"""Options of the model_server fixture become arguments of the command."""

from __future__ import annotations

from flambeau.client.local_server import to_arguments


def test_options_become_arguments():
    given = {"batch_size": 4, "watch": True, "error_details": False, "name": None}
    assert to_arguments(given) == ["--batch-size", "4", "--watch", "--no-error-details"]
