"""Loggers of a training: files, TensorBoard, MLflow, or any object with a `log(values, step=…)`."""

from hookcb.loggers.base import Logger, as_logger
from hookcb.loggers.callback import Log
from hookcb.loggers.files import CSVLogger, JSONLLogger, read_csv
from hookcb.loggers.mlflow import MLflowLogger
from hookcb.loggers.tensorboard import TensorBoardLogger
from hookcb.records.jsonl import read_jsonl
from hookcb.records.recording import Histogram

__all__ = [
    "CSVLogger",
    "Histogram",
    "JSONLLogger",
    "Log",
    "Logger",
    "MLflowLogger",
    "TensorBoardLogger",
    "as_logger",
    "read_csv",
    "read_jsonl",
]
