"""The TrainJob of the recipes says what its author meant, as Kubeflow Trainer's own models read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

RECIPE = Path(__file__).parents[2] / "examples/recipes/trainjob.yaml"
models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")


def test_every_field_is_one_that_kubeflow_knows() -> None:
    """Its models drop keys that they do not know, so what comes back must be all that went in."""
    written = yaml.safe_load(RECIPE.read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict(written)
    assert read.to_dict() == written
