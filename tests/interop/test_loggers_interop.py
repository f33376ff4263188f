"""What `Log` sends arrives at TensorBoard, wandb, trackio and MLflow, as their own tools read it."""

import importlib
import json
import math
import pickle
import re
import struct
import sys
import time
import warnings

import pytest

from hookcb import ActivationStats, Callback, GradientHealth
from hookcb.loggers import Histogram, Log, MLflowLogger, TensorBoardLogger, as_logger
from tests.support import fit, make_learner, same, weights

# what they say of their own dependencies, on some versions of Python
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NUMBERS = {"loss": 0.5, "nothing": math.nan, "most": math.inf, "activations/lstm[0]/mean": -0.25, "fc#1": 2.0}


class Kept:
    """A logger that keeps everything, by name and step."""

    def __init__(self):
        self.values = {}

    def log(self, values, step):
        self.values |= {(name, step): x for name, x in values.items()}


def trained(*loggers, n_train=5, n_epoch=2):
    """What is logged of a fit, after a logger of another kind has had the same; its weights are unchanged."""
    kept = Kept()
    recorders = [ActivationStats(with_hist=True, bins=6), GradientHealth()]
    learn = fit(make_learner(n_train), n_epoch, cbs=[*recorders, Log([*loggers, kept], every=2)])
    assert same(weights(learn.model), weights(fit(make_learner(n_train), n_epoch).model))
    return kept.values, learn


def equal(got, expected, **tolerance):
    assert got.keys() == expected.keys()
    assert got == pytest.approx(expected, nan_ok=True, **({"rel": 0, "abs": 0} | tolerance))


def without_histograms(got, learn):
    """The numbers; histograms are those of all layers and records."""
    stats = learn.activation_stats
    hists = {key: got.pop(key) for key in list(got) if isinstance(got[key], dict)}
    steps = (0, 2, 4, 6, 8, 9)
    assert set(hists) == {(f"activations/{name}", step) for name in stats.names for step in steps}
    for (name, step), hist in hists.items():
        recorded = stats.hist(name.removeprefix("activations/"))[:, step].expm1()
        assert sum(hist["values"]) == recorded.sum().round()
        assert len(hist["bins"]) == len(hist["values"]) + 1
    return got


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


# ---- TensorBoard


def accumulated(folder):
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    return events.Reload()


def scalars(folder):
    events = accumulated(folder)
    return {(name, x.step): x.value for name in events.Tags()["scalars"] for x in events.Scalars(name)}


def test_tensorboard_has_every_scalar_and_histogram(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    expected, learn = trained(logger)
    assert not logger.is_open
    equal(scalars(tmp_path), expected, rel=1e-6)  # it keeps float32
    events, stats = accumulated(tmp_path), learn.activation_stats
    assert set(events.Tags()["histograms"]) == {"activations/0", "activations/2"}
    for name in stats.names:
        found = events.Histograms(f"activations/{name}")
        assert [x.step for x in found] == [0, 2, 4, 6, 8, 9]
        for x in found:
            counts = stats.hist(name)[:, x.step].expm1()  # in one range for all records
            low, *_, high = x.histogram_value.bucket_limit[:-1]  # in that of this record
            assert low <= stats.stats[x.step][name]["min"]
            assert high >= stats.stats[x.step][name]["max"]
            assert sum(x.histogram_value.bucket[1:-1]) == x.histogram_value.num == counts.sum().round()
            assert x.histogram_value.max == stats.stats[x.step][name]["max"]


def test_what_is_outside_of_a_histogram_is_between_its_edge_and_the_extreme(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_histograms(
        {"x": Histogram(0.0, 2.0, (3.0, 1.0), below=5.0, above=2.0, min=-4.0, max=8.0)}, step=1
    )
    logger.log_histograms({"x": Histogram(0.0, 2.0, (0.0, 0.0), 0.0, 0.0, math.nan, math.nan)}, step=2)
    whole, empty = (x.histogram_value for x in accumulated(tmp_path).Histograms("x"))
    assert (whole.min, whole.max, whole.num) == (-4.0, 8.0, 11.0)
    assert whole.bucket_limit == [0.0, 1.0, 2.0, 8.0]
    assert whole.bucket == [5.0, 3.0, 1.0, 2.0]
    assert whole.sum == 5 * -2 + 3 * 0.5 + 1 * 1.5 + 2 * 5
    assert whole.sum_squares == 5 * 4 + 3 * 0.25 + 1 * 2.25 + 2 * 25
    assert empty.num == 0
    logger.close()


def test_tensorboard_shows_a_statistic_of_all_layers_in_one_chart_and_as_images(tmp_path):
    trained(TensorBoardLogger(tmp_path))
    events = accumulated(tmp_path)
    config = importlib.import_module("tensorboard.plugins.custom_scalar.metadata").CONFIG_SUMMARY_TAG
    layout = importlib.import_module("tensorboard.plugins.custom_scalar.layout_pb2").Layout()
    layout.ParseFromString(events.Tensors(config)[-1].tensor_proto.string_val[0])
    charts = {
        category.title: {x.title: x.multiline.tag for x in category.chart} for category in layout.category
    }
    assert set(charts) == {"activations", "gradients"}
    (pattern,) = charts["activations"]["rms"]
    shown = [name for name in events.Tags()["scalars"] if re.match(pattern, name)]  # as the plugin does
    assert shown == ["activations/0/rms", "activations/2/rms"]
    for stat in ("rms", "kurtosis", "near_zero"):
        images = events.Images(f"figures/activation_stats/{stat}")
        assert [x.step for x in images] == [4, 9]
        assert images[-1].encoded_image_string.startswith(b"\x89PNG")


def test_tensorboard_can_be_read_while_nothing_is_closed(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    for step in range(3):
        logger.log(NUMBERS, step=step)
        expected = {(name, i): x for name, x in NUMBERS.items() for i in range(step + 1)}
        equal(scalars(tmp_path), expected)
    assert logger.is_open
    logger.close()
    logger.close()


def test_a_resumed_training_hides_what_a_crash_had_left(tmp_path, monkeypatch):
    files = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    # files of one second are read in the order of these numbers, as texts
    monkeypatch.setattr(files, "_global_uid", files.AtomicCounter(100))
    crashed = TensorBoardLogger(tmp_path)
    for step in (0, 50, 100):
        crashed.log({"loss": 1.0}, step=step)
    crashed.close()
    crashed.log({"loss": 1.0}, step=60)  # by itself it goes on in any order
    crashed.close()
    assert [step for _, step in scalars(tmp_path)] == [0, 50, 100, 60]
    resumed = pickle.loads(pickle.dumps(TensorBoardLogger(tmp_path)))
    for step in (50, 100):
        resumed.log({"loss": 2.0}, step=step)
    resumed.close()
    assert scalars(tmp_path) == {("loss", 0): 1.0, ("loss", 50): 2.0, ("loss", 100): 2.0}


def test_a_summary_writer_is_refused_with_a_hint(tmp_path):
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    with pytest.raises(TypeError, match=r"TensorBoardLogger\(folder\)"):
        as_logger(writer)
    writer.close()


# ---- wandb


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    return importlib.import_module("wandb")


def records(path):
    """Of an offline run's file, which is a log as LevelDB has it: blocks of 32 kB."""
    record_of = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:  # no room for a header
            at += 32_768 - at % 32_768
            continue
        _, n, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + n > len(data):  # it is being written
            return
        part, at = part + data[at + 7 : at + 7 + n], at + 7 + n
        if kind in (1, 4):  # whole, or the last part
            yield record_of.FromString(part)
            part = b""


def history(folder):
    """What an offline run that was finished has in its file, by name and step."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    began = time.monotonic()
    while not any(record.HasField("exit") for record in records(path)):
        assert time.monotonic() - began < 30, "the run is not finished"
        time.sleep(0.01)  # another process writes it
    found = {}
    for record in records(path):
        for item in record.history.item:
            name, *part = item.nested_key or [item.key]
            key, value = (name, record.history.step.num), json.loads(item.value_json)
            if part:
                found.setdefault(key, {})[part[0]] = value
            elif not name.startswith("_"):
                found[key] = value
    return found


def test_a_run_of_wandb_gets_everything(wandb, tmp_path):
    with wandb.init(project="hookcb", dir=tmp_path) as run:
        expected, learn = trained(run)
        as_logger(run).log(NUMBERS, step=20)
        as_logger(run).log_text("verdict", "SICK\n<why>", step=21)
        assert not run._is_finished  # whoever began it ends it
    expected |= {(name, 20): x for name, x in NUMBERS.items()}
    got = history(tmp_path)
    images = {key: got.pop(key) for key in list(got) if key[0].startswith("figures/")}
    (text,) = tmp_path.glob(f"wandb/offline-run-*/files/{got.pop(('verdict', 21))['path']}")
    assert "<pre>SICK\n&lt;why&gt;</pre>" in text.read_text()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    updates = [x for record in records(path) for x in record.summary.update]
    last = {x.key or "/".join(x.nested_key): x.value_json for x in updates}
    assert last["verdict/headline"] == '"SICK"'
    equal(without_histograms(got, learn), expected)
    assert sorted(step for name, step in images if name == "figures/activation_stats/rms") == [4, 9]
    for image in images.values():
        assert is_png(*tmp_path.glob(f"wandb/offline-run-*/files/{image['path']}"))


def test_the_module_wandb_itself_can_be_given_before_a_run_begins(wandb, tmp_path):
    log = Log(wandb, every=2)
    with pytest.warns(UserWarning, match="You must call wandb.init"):
        fit(make_learner(), cbs=log)
    with wandb.init(project="hookcb", dir=tmp_path):
        learn = fit(make_learner(), cbs=log)
    losses = {step: x for (name, step), x in history(tmp_path).items() if name == "loss"}
    assert losses == {step: learn.recorder.losses[step] for step in (0, 2)}


# ---- trackio


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # which it reads when it is imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("trackio")


@pytest.mark.parametrize("as_module", [False, True])
def test_trackio_gets_everything(trackio, as_module, tmp_path):
    quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    run = trackio.init(project="hookcb", name="first", **quiet)
    expected, learn = trained(trackio if as_module else run)
    run.log(NUMBERS, step=20)
    expected |= {(name, 20): x for name, x in NUMBERS.items()}
    trackio.finish()
    assert (tmp_path / "hookcb.db").exists()
    logs = importlib.import_module("trackio.sqlite_storage").SQLiteStorage.get_logs("hookcb", "first")
    got = {(name, row["step"]): x for row in logs for name, x in row.items()}
    images = {key: got.pop(key) for key in list(got) if key[0].startswith("figures/")}
    got = {key: x for key, x in got.items() if key[0] not in ("step", "timestamp", "verdict")}
    equal(without_histograms(got, learn), expected)
    assert sorted(step for name, step in images if name == "figures/activation_stats/rms") == [4, 9]
    for image in images.values():
        assert is_png(*tmp_path.rglob(image["file_path"].rpartition("/")[2]))


# ---- MLflow


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the store that mlflow-skinny has
    mlflow = importlib.import_module("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield mlflow
    mlflow.set_tracking_uri(before)


def metrics(mlflow, run_id):
    client = mlflow.MlflowClient()
    names = client.get_run(run_id).data.metrics
    return {(m.key, m.step): m.value for name in names for m in client.get_metric_history(run_id, name)}


def runs_of(mlflow, experiment):
    return mlflow.search_runs(experiment_names=[experiment], output_format="list")


def status(mlflow, run_id):
    return mlflow.MlflowClient().get_run(run_id).info.status


def test_a_run_of_an_experiment_is_begun_and_ended_by_the_fit(mlflow):
    logger = MLflowLogger(experiment="digits")
    assert mlflow.get_experiment_by_name("digits") is None
    expected, _ = trained(logger)
    assert metrics(mlflow, logger.run_id) == pytest.approx(expected, nan_ok=True)
    images = mlflow.MlflowClient().list_artifacts(logger.run_id, "figures/activation_stats")
    assert [x.path.rpartition("/")[2] for x in images] == ["kurtosis.png", "near_zero.png", "rms.png"]
    assert status(mlflow, logger.run_id) == "FINISHED"
    assert (
        mlflow.get_experiment_by_name("digits").experiment_id
        == mlflow.get_run(logger.run_id).info.experiment_id
    )
    assert mlflow.active_run() is None


def test_what_is_logged_after_the_end_goes_on_with_the_run(mlflow):
    logger = MLflowLogger(experiment="digits")
    logger.log({"loss": 1.0}, step=0)
    logger.close()
    again = pickle.loads(pickle.dumps(logger))
    again.log({"loss": 2.0}, step=1)
    assert (again.run_id, again.is_open, status(mlflow, again.run_id)) == (logger.run_id, True, "RUNNING")
    again.close()
    assert status(mlflow, logger.run_id) == "FINISHED"
    assert metrics(mlflow, logger.run_id) == {("loss", 0): 1.0, ("loss", 1): 2.0}
    another = MLflowLogger(experiment="digits")
    another.log({"loss": 3.0}, step=0)
    another.close()
    assert len(runs_of(mlflow, "digits")) == 2


def test_a_run_of_someone_else_is_left_running(mlflow):
    with mlflow.start_run() as run:
        for logger in (MLflowLogger(), MLflowLogger(run), MLflowLogger(run.info.run_id)):
            assert logger.run_id == run.info.run_id
            fit(make_learner(), cbs=Log(logger, every=2))
            assert not logger.is_open
            assert status(mlflow, run.info.run_id) == "RUNNING"
    assert len(mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")) == 6


def test_names_that_mlflow_refuses_get_there_too(mlflow):
    logger = MLflowLogger(experiment="odd")
    logger.log(NUMBERS, step=3)
    logger.close()
    named = {"activations/lstm[0]/mean": "activations/lstm-0-/mean", "fc#1": "fc-1"}
    expected = {(named.get(name, name), 3): x for name, x in NUMBERS.items()}
    equal(metrics(mlflow, logger.run_id), expected)


def test_more_numbers_than_mlflow_takes_at_once_get_there(mlflow):
    logger = MLflowLogger(experiment="large")
    many = {f"layer{i}/mean": float(i) for i in range(1_005)}
    logger.log(many, step=4)
    logger.close()
    assert mlflow.get_run(logger.run_id).data.metrics == many


def test_what_mlflow_cannot_know_is_refused(mlflow):
    with pytest.raises(RuntimeError, match=r"no run is active; give run= or experiment="):
        MLflowLogger()
    with pytest.raises(ValueError, match="give one of them"):
        MLflowLogger("some id", experiment="digits")
    for thing in (mlflow, mlflow.MlflowClient()):
        with pytest.raises(TypeError, match=r"for MLflow, give MLflowLogger\(run\)"):
            as_logger(thing)


def test_a_run_that_does_not_exist_is_told_of_and_training_goes_on(mlflow):
    learn = make_learner()
    with pytest.warns(UserWarning, match=r"MLflowLogger\('0{32}'\) failed with"):
        fit(learn, cbs=Log(MLflowLogger("0" * 32)))
    assert len(learn.recorder.losses) == 3


# ---- all together


def test_a_crash_leaves_everything_readable_and_all_that_was_opened_closed(tmp_path, mlflow, wandb):
    class Fault(Callback):
        def before_step(self):
            if self.train_iter == 4:
                raise ArithmeticError

    board, flow = TensorBoardLogger(tmp_path / "board"), MLflowLogger(experiment="digits")
    with wandb.init(project="hookcb", dir=tmp_path) as run, pytest.raises(ArithmeticError):
        fit(make_learner(9), cbs=[Fault, Log([board, flow, run], every=2)])
    assert (board.is_open, flow.is_open) == (False, False)
    for found in (scalars(tmp_path / "board"), metrics(mlflow, flow.run_id), history(tmp_path)):
        assert {key for key in found if key[0] == "loss"} == {("loss", 0), ("loss", 2)}


def test_nothing_is_warned_of_when_all_goes_well(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(TensorBoardLogger(tmp_path))
