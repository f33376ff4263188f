"""Loggers of a training: files, TensorBoard, MLflow, or any object with a `log(values, step=…)`."""

from hookcb.loggers.adapt import as_logger
from hookcb.loggers.base import Histogram, Logger
from hookcb.loggers.callback import Log
from hookcb.loggers.csv import CSVLogger, read_csv
from hookcb.loggers.jsonl import JSONLLogger
from hookcb.loggers.mlflow import MLflowLogger
from hookcb.loggers.tensorboard import TensorBoardLogger
from hookcb.records.jsonl import read_jsonl

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
