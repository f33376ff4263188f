"""Verdict and figures arrive at TensorBoard, MLflow, wandb and trackio."""

import importlib
import json
import sys

import pytest

from hookcb import ActivationStats, Diagnose
from hookcb.loggers import Log, MLflowLogger, TensorBoardLogger
from tests.support import fit, make_learner

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
PNG = b"\x89PNG"


def train(logger):
    learn = fit(
        make_learner(8), 2, cbs=[ActivationStats(with_hist=True), Log(logger, every=4), Diagnose(show=False)]
    )
    return learn.diagnosis.verdict.headline


def test_tensorboard_has_text_and_images(tmp_path):
    headline = train(TensorBoardLogger(tmp_path))
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    (text,) = events.Tensors("verdict/text_summary")
    assert headline in text.tensor_proto.string_val[0].decode()
    assert text.step == 15
    images = events.Tags()["images"]
    assert {f"figures/activation_stats/{kind}" for kind in ("depth", "histograms")} <= set(images)
    for name in images:
        for image in events.Images(name):
            assert image.encoded_image_string.startswith(PNG)
            assert image.width > 100


def test_mlflow_has_artifacts_and_a_tag(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the store that mlflow-skinny has
    mlflow = importlib.import_module("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    client = mlflow.MlflowClient()
    experiment = client.create_experiment("first", artifact_location=(tmp_path / "artifacts").as_uri())
    run = client.create_run(experiment)
    headline = train(MLflowLogger(run))
    assert client.get_run(run.info.run_id).data.tags["verdict"] == headline
    folder = next((tmp_path / "artifacts").glob("*/artifacts"))
    assert (folder / "verdict.txt").read_text(encoding="utf-8").startswith(headline)
    assert (folder / "figures/activation_stats/depth.png").read_bytes().startswith(PNG)
    mlflow.set_tracking_uri(before)


def test_wandb_has_html_images_and_a_summary(tmp_path, monkeypatch):
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb = importlib.import_module("wandb")
    with wandb.init(project="hookcb", dir=tmp_path) as run:
        headline = train(run)
        assert run.summary["verdict/headline"] == headline
        files = tmp_path.rglob("media/**/*.*")
        kinds = {file.suffix for file in files}
    assert {".html", ".png"} <= kinds


def test_trackio_has_markdown_and_images(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # which it reads when it is imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    trackio = importlib.import_module("trackio")
    quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    run = trackio.init(project="hookcb", name="first", **quiet)
    headline = train(run)
    trackio.finish()
    logs = importlib.import_module("trackio.sqlite_storage").SQLiteStorage.get_logs("hookcb", "first")
    found = {name: x for row in logs for name, x in row.items()}
    assert headline in json.dumps(found["verdict"], ensure_ascii=False)
    assert found["figures/activation_stats/depth"]["_type"] == "trackio.image"
