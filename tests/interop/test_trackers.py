"""Runs of other libraries get numbers, histograms, texts and images, as their offline files have them.

Most are not among the extra `interop`, so each test is skipped if its library is not installed.
"""

import glob
import json
import math
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hookcb import ActivationStats, Diagnose
from hookcb.loggers import Log
from hookcb.loggers.base import as_logger
from hookcb.loggers.media import bins_of
from hookcb.loggers.trackers import chart_and_line
from tests.interop.test_loggers_interop import Kept as KeptNumbers
from tests.support import fit, make_learner

pytestmark = pytest.mark.filterwarnings("ignore")  # what they say of their own dependencies
ODD = {"activations/lstm[0]/mean": -0.25, "fc#1": 2.0, "odd/nothing": math.nan, "odd/most": math.inf}


class Kept(KeptNumbers):
    """A logger that also keeps histograms, texts and the names of figures."""

    def __init__(self):
        super().__init__()
        self.hists, self.texts, self.figures = {}, {}, set()

    def log_histograms(self, hists, step):
        self.hists |= {(name, step): hist for name, hist in hists.items()}

    def log_text(self, name, text, step):
        self.texts[name] = text

    def log_figure(self, name, figure, step):
        self.figures.add((name, step))


def logged(run):
    """What a run, and an object beside it, have been given; also numbers with odd names and values."""
    kept, log = Kept(), Log(run, every=4)
    cbs = [
        ActivationStats(with_hist=True, bins=6),
        Log([run, kept], every=4, name="both"),
        Diagnose(show=False),
    ]
    fit(make_learner(8), 2, cbs=cbs)
    log.loggers[0].log(ODD, step=20)
    kept.log(ODD, step=20)
    return kept


def equal(got, expected):
    assert got == pytest.approx(expected, nan_ok=True, rel=1e-12)


def finite(numbers):
    return {key: x for key, x in numbers.items() if math.isfinite(x)}


def test_comet_gets_everything(tmp_path):
    comet = pytest.importorskip("comet_ml")
    quiet = dict.fromkeys(("log_code", "log_graph", "auto_metric_logging", "log_env_details"), False)
    run = comet.OfflineExperiment(
        project_name="hookcb", workspace="w", offline_directory=str(tmp_path), **quiet
    )
    kept = logged(run)
    run.end()
    with zipfile.ZipFile(*tmp_path.glob("*.zip")) as archive:
        messages = list(map(json.loads, archive.read("messages.json").decode().splitlines()))
        found = [(m["type"], m["payload"]) for m in messages]
        sent = [x for kind, x in found if kind == "file_upload"]
        files = {(x["upload_type"], *named(x)): archive.read(x["file_path"]) for x in sent}
    metrics = [x["metric"] for kind, x in found if kind == "metric_msg"]
    numbers = {(x["metricName"], x["step"]): float(x["metricValue"]) for x in metrics}
    equal({key: x for key, x in numbers.items() if key[0] != "process duration"}, kept.values)
    assert {key[1:] for key in files if key[0] == "visualization"} == kept.figures
    assert {key[1:] for key in files if key[0] == "histogram3d"} == set(kept.hists)
    for name, step in kept.hists:
        counted = json.loads(files["histogram3d", name, step])["index_values"]
        assert sum(n for _, n in counted) == sum(kept.hists[name, step].counts)
    (text,) = [x.decode() for key, x in files.items() if key[0] == "text-sample"]
    assert text == kept.texts["verdict"]
    others = {x["key"]: x["value"] for kind, x in found if kind == "log_other"}
    assert others["verdict"] == text.partition("\n")[0]


def named(upload):
    given = upload["additional_params"]
    return given.get("figName") or given["fileName"], given["step"]


def test_clearml_gets_everything_that_is_finite(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path))
    clearml = pytest.importorskip("clearml")
    clearml.Task.set_offline(True)
    nothing = {
        "auto_connect_frameworks": False,
        "auto_connect_streams": False,
        "auto_connect_arg_parser": False,
    }
    task = clearml.Task.init("hookcb", "first", auto_resource_monitoring=False, **nothing)
    kept, folder = logged(task), Path(task.get_offline_mode_folder())
    assert type(as_logger(task.get_logger())) is type(as_logger(task))
    task.close()
    events = [event for line in (folder / "metrics.jsonl").open() for event in json.loads(line)]
    of_kind = {kind: [x for x in events if x["type"] == kind] for kind in {x["type"] for x in events}}
    numbers = {(x["metric"], x["variant"], x["iter"]): x["value"] for x in of_kind["training_stats_scalar"]}
    equal(numbers, {(*chart_and_line(name), step): x for (name, step), x in finite(kept.values).items()})
    assert ("activations/rms", "2", 0) in numbers  # a chart with a line for each layer
    assert {(x["metric"], x["iter"]) for x in of_kind["plot"]} == set(kept.hists)
    assert {(x["metric"], x["iter"]) for x in of_kind["training_debug_image"]} == kept.figures
    assert kept.texts["verdict"].partition("\n")[0] in (folder / "log.jsonl").read_text()


@pytest.mark.parametrize("of", [lambda run: run, lambda run: run["part"]], ids=["run", "namespace"])
def test_neptune_gets_numbers_text_and_images(of, tmp_path, monkeypatch):
    neptune = pytest.importorskip("neptune")
    monkeypatch.chdir(tmp_path)
    quiet = dict.fromkeys(("capture_hardware_metrics", "capture_stdout", "capture_stderr", "git_ref"), False)
    run = neptune.init_run(mode="offline", **quiet)
    kept = logged(of(run))
    run.stop()
    numbers, texts, images = {}, {}, set()
    for op in operations(Path(*glob.glob(".neptune/offline/*/data-*.log")).read_text()):
        name = "/".join(op["path"]).removeprefix("part/")
        if op["type"] == "AssignString":
            texts[name] = op["value"]
        elif op["type"] == "LogFloats":
            numbers |= {(name, int(x["step"])): x["value"] for x in op["values"]}
        elif op["type"] == "LogImages":
            images |= {(name, int(x["step"])) for x in op["values"]}
    equal(numbers, finite(kept.values))
    assert texts["verdict"] == kept.texts["verdict"]
    assert images == kept.figures


def operations(text):
    decoder = json.JSONDecoder()
    while text := text.strip(" \n\0"):
        found, end = decoder.raw_decode(text)
        yield found["obj"]
        text = text[end:]


def test_neptune_scale_gets_everything(tmp_path):
    scale = pytest.importorskip("neptune_scale")
    options = {"enable_console_log_capture": False, "source_tracking_config": None}
    run = scale.Run(run_id="first", project="a/b", mode="offline", log_directory=tmp_path, **options)
    kept = logged(run)
    run.close()
    repository = pytest.importorskip("neptune_scale.sync.operations_repository").OperationsRepository
    (path,) = tmp_path.rglob("*.sqlite3")
    assert sqlite3.connect(path).execute("select 1").fetchone() == (1,)
    stored = repository(db_path=path)
    found = {"float64": {}, "histogram": {}, "string": {}, "file_ref": {}}
    for op in stored.get_operations(10**9):
        for name, value in getattr(op.operation, "append", {}).items():
            kind = value.WhichOneof("value")
            found[kind][name, op.operation.step.whole] = getattr(value, kind)
    equal(found["float64"], kept.values)
    assert {key: list(x.bin_edges) for key, x in found["histogram"].items()} == {
        key: bins_of(hist)[1] for key, hist in kept.hists.items()
    }
    assert [*found["string"].values()] == [kept.texts["verdict"]]
    assert set(found["file_ref"]) == kept.figures


READ = """
import json, sys
import aim
from aim.storage.context import Context
repo, run = aim.Repo(sys.argv[1]), None
run = repo.get_run(sys.argv[2])
numbers = []
for metric in run.metrics():
    table = metric.dataframe(include_name=False, include_context=False, include_run=False)
    of = [metric.name, metric.context.to_dict().get("layer", metric.name)]
    numbers += [[*of, step, x] for step, x in zip(table["step"].tolist(), table["value"].tolist())]
info = run.collect_sequence_info(("images", "texts"))
text = run.get_text_sequence("verdict", Context({})).values.tolist()
names = {kind: [x["name"] for x in of_kind] for kind, of_kind in info.items()}
print(json.dumps([numbers, [x.data for x in text if x], names["images"]]))
"""


def test_aim_gets_numbers_text_and_images(tmp_path):
    aim = pytest.importorskip("aim")
    run = aim.Run(
        repo=str(tmp_path),
        system_tracking_interval=None,
        log_system_params=False,
        capture_terminal_logs=False,
    )
    kept, name = logged(run), run.hash
    run.close()
    reindex = [Path(sys.executable).with_name("aim"), "storage", "--repo", tmp_path, "reindex", "-y"]
    subprocess.run(reindex, check=True, capture_output=True)
    read = [sys.executable, "-c", READ, tmp_path, name]
    done = subprocess.run(read, capture_output=True, text=True)
    numbers, texts, images = json.loads(done.stdout.splitlines()[-1])
    equal(
        {(chart, line, step): x for chart, line, step, x in numbers},
        {(*chart_and_line(name), step): x for (name, step), x in kept.values.items()},
    )
    assert texts == [kept.texts["verdict"]]
    assert set(images) == {name for name, _ in kept.figures}


@pytest.mark.parametrize("as_module", [False, True])
def test_swanlab_gets_numbers_text_and_images(as_module, tmp_path):
    swanlab = pytest.importorskip("swanlab")
    run = swanlab.init(project="hookcb", mode="offline", logdir=str(tmp_path))
    kept = logged(swanlab if as_module else run)
    swanlab.finish()
    store = pytest.importorskip("swanlab.sdk.internal.core_python.store").DataStoreReader()
    record_of = pytest.importorskip("swanlab.proto.swanlab.record.v1.record_pb2").Record
    (path,) = tmp_path.glob("*/run-*.swanlab")
    store.open(path)
    records = list(map(record_of.FromString, store))
    scalars = [record.scalar for record in records if record.HasField("scalar")]
    equal({(x.key, x.step): x.value.number for x in scalars}, kept.values)
    media = {(record.media.key, record.media.step) for record in records if record.HasField("media")}
    assert media == {("verdict", 15), *kept.figures}
    (text,) = path.parent.glob("media/text/*")
    assert text.read_text() == kept.texts["verdict"]
