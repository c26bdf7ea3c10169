"""What a study says at its end."""

import pytest

from qrl.study import report


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("sqlite:///{here}/mlflow.db", "mlflow ui, then"),
        ("sqlite:///{here}/%6dlflow.db", "mlflow ui, then"),  # as MLflow itself spells folders with a space
        (
            "sqlite:////elsewhere/a b/mlflow.db",
            "mlflow ui --backend-store-uri 'sqlite:////elsewhere/a b/mlflow.db', then",
        ),
        ("http://tracking:5000", "http://tracking:5000"),
    ],
)
def test_the_ui_is_opened_on_the_store_that_was_used(address, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report.look(address.format(here=tmp_path)).startswith(says)
